"""What all plots share: axes that are given or made, labels, styles, and nothing left behind."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import plotting
from dpjax._core._pytree import made
from dpjax._core._values import Release
from dpjax.population._confidence_set import ConfidenceSet
from dpjax.population._posterior import Draws, Posterior
from dpjax.population._search import Search

matplotlib = pytest.importorskip("matplotlib")
pyplot = pytest.importorskip("matplotlib.pyplot")

LAPLACE = dpjax.laplace(1.0, 1.0)
GAUSSIAN = dpjax.gaussian(1.0, 1.0, 1e-5)
POINTS = [
    dpjax.operating_point(m=m, gamma=0.1, confidence=confidence)
    for m in (100, 200)
    for confidence in (0.99, None)
]
RECORDS = types.SimpleNamespace(
    confidence=0.99,
    uncovered=np.array([1, 2]),
    **{name: np.array([0.1, 0.2]) for name in ("lower", "upper", "estimates")},
)
PROFILE = types.SimpleNamespace(
    epsilon=1.0, confidence=0.99, gamma=lambda x: 0.1 * np.exp(-x), delta=lambda x: np.exp(-x)
)
ROC = dpjax.attacks.roc_curve(np.arange(100.0), np.arange(100) % 3 == 0)
AUDIT = {"bounded": "epsilon", "delta": 0.0, "claimed": 1.0, "confidence": 0.95, "samples": 100}

SHARES = Draws(np.linspace(0, 1, 1000, dtype=np.float32))
POSTERIOR = Posterior(np.full(1000, 1e-3), 1000.0, SHARES)


def searched_set():
    """A confidence set whose search is done."""
    found = made(ConfidenceSet, 0.95, (np.zeros(()), np.ones(())), 199)
    vars(found)["_simulation"] = types.SimpleNamespace(tree=lambda row: row[0])

    def evaluate(x):
        return np.where(abs(x[:, 0] - 0.4) < 0.1, 0.5, 0.01), np.repeat(x - 0.4, 199, axis=1)

    search = Search(evaluate, 0.05, 1)
    vars(found)["_searched"] = search, search.ends()
    return found


def square(x):
    return x[0] ** 2


def rehearsed(ratios, relations=("replace-one", "replace-one")):
    """What `rehearsal` uses of a data set."""
    values = {"mechanism": ["a", "b"], "relation": relations}
    found = {name: types.SimpleNamespace(values=value) for name, value in values.items()}
    each = np.outer(ratios, [0.1, 1.0, 10.0])
    return {"noise_over_spread": ratios, "noise_over_spread_each": each, **found}


# Each with as many curves as it has.
PLOTS = {
    "audit_curve": lambda ax, _: plotting.audit_curve(
        [types.SimpleNamespace(bound=0.5, **AUDIT)], ax=ax
    ),
    "ledger_history": lambda ax, _: plotting.ledger_history(
        types.SimpleNamespace(history=lambda: [{"spent_epsilon": 0.1}], budget=(1, 0)), ax=ax
    ),
    "confidence_set": lambda ax, _: plotting.confidence_set(searched_set(), ax=ax),
    "gamma_by_record": lambda ax, _: plotting.gamma_by_record(
        RECORDS, [1.0, 2.0], unit="mm", ax=ax
    ),
    "least_pairs": lambda ax, _: plotting.least_pairs(POINTS, ax=ax),
    "noise": lambda ax, _: plotting.noise({"a": LAPLACE, "b": GAUSSIAN}, unit="mm", ax=ax),
    "overestimate": lambda ax, _: plotting.overestimate(POINTS, lambda u: 1 + u, ax=ax),
    "posterior": lambda ax, _: plotting.posterior(POSTERIOR, unit="mm", ax=ax),
    "privacy_profile": lambda ax, _: plotting.privacy_profile(PROFILE, ax=ax),
    "tradeoff": lambda ax, _: plotting.tradeoff({"a release": LAPLACE.risk}, ax=ax),
    "recovered_fraction": lambda ax, _: plotting.recovered_fraction(
        [0.1, 1.0], {"a": [1.0, 0.8], "b": [0.9, 0.7]}, guarantee=LAPLACE.guarantee, ax=ax
    ),
    "regret_bounds": lambda ax, _: plotting.regret_bounds(
        [10, 100],
        experts=3,
        epsilon=1.0,
        delta=0.1,
        realized={"not private": [0.1, 0.2], "private, bounded range": [0.3, 0.2]},
        ax=ax,
    ),
    "rehearsal": lambda ax, _: plotting.rehearsal(rehearsed([0.5, 20.0]), ax=ax),
    "release_with_error": lambda ax, _: plotting.release_with_error(
        Release(jnp.ones(2), LAPLACE.guarantee), np.zeros(2), unit="mm", ax=ax
    ),
    "released_function": lambda ax, _: plotting.released_function(
        dpjax.BernsteinPolynomial(jnp.arange(3.0)), square, ax=ax
    ),
    "roc_curve": lambda ax, _: plotting.roc_curve({"a": ROC, "b": ROC}, LAPLACE.guarantee, ax=ax),
    "sensitivity_ecdf": lambda ax, _: plotting.sensitivity_ecdf(
        np.arange(1.0, 101), POINTS[0], cdf=lambda x: x / 100, unit="mm", ax=ax
    ),
    "utility": lambda ax, sweep: plotting.utility(sweep, ax=ax),
}


@pytest.fixture(autouse=True)
def figure_of_another():
    """Someone left a figure open; no test is about it."""
    with matplotlib.rc_context():
        pyplot.switch_backend("agg")
        figure = pyplot.figure()
        yield
        pyplot.close(figure)


every = pytest.mark.parametrize("name", PLOTS)


def test_every_plot_is_here():
    assert set(PLOTS) == {name for name in vars(plotting) if not name.startswith("_")}


@every
def test_it_draws_on_the_axes_that_it_is_given(name, ax, sweep):
    before, figures = dict(matplotlib.rcParams), pyplot.get_fignums()
    assert PLOTS[name](ax, sweep) is ax
    assert ax.get_lines()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert pyplot.get_fignums() == figures
    assert dict(matplotlib.rcParams) == before


@every
def test_no_two_curves_differ_by_color_alone(name, ax, sweep):
    PLOTS[name](ax, sweep)
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    looks = [(line.get_linestyle(), line.get_marker()) for line in lines]
    colors = [matplotlib.colors.to_hex(line.get_color()) for line in lines]
    assert len(set(looks)) == len(lines)
    assert set(colors) <= {color.lower() for color in plotting._axes.COLORS}


@every
def test_without_axes_it_makes_a_figure(name, sweep, monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda: pytest.fail("a plot must not show itself"))
    figures = pyplot.get_fignums()
    made = PLOTS[name](None, sweep)
    assert pyplot.get_fignums() == [*figures, made.figure.number]
    made.figure.canvas.draw()  # No warning, which would be an error here.
    pyplot.close(made.figure)


def test_importing_dpjax_does_not_import_matplotlib(run_python):
    assert run_python("import sys, dpjax; print('matplotlib' in sys.modules)") == "False"


def test_a_plot_in_a_process_without_a_screen(run_python):
    code = """
import sys, dpjax
axes = dpjax.plotting.noise({"Laplace": dpjax.laplace(1.0, 1.0)})
axes.figure.canvas.draw()
print('xarray' in sys.modules, len(axes.get_lines()))
"""
    assert run_python(code, DISPLAY="", MPLBACKEND="") == "False 1"


def test_rehearsed_ratios_are_where_they_belong(ax):
    plotting.rehearsal(rehearsed([0.5, np.nan], ["replace-one", "add-or-remove-one"]), ax=ax)
    small, large, *_ = ax.get_lines()
    np.testing.assert_allclose(small.get_xdata(), [0.05, 0.5, 5.0])
    assert (large.get_xdata(), large.get_ydata()) == ([0.5], [0])
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["a\n(replace-one)", "b\n(add-or-remove-one)\n(not finite)"]


def test_a_number_of_several_is_chosen_by_its_name(ax):
    pair = Posterior(POSTERIOR.weights, 1000.0, Draws({"a": SHARES.tree, "b": 2 + SHARES.tree}))
    with pytest.raises(ValueError, match="number must be one of a, b"):
        plotting.posterior(pair)
    plotting.posterior(pair, number="b", ax=ax)
    assert ax.get_lines()[0].get_xdata()[0] == pytest.approx(2.5)
    assert ax.get_xlabel() == "b"
