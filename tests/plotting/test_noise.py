"""Noise side by side: densities, and where most of it stays."""

import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.plotting import noise

MECHANISMS = {
    "Laplace": dpjax.laplace(2.0, 1.0),
    "Gaussian": dpjax.gaussian(1.0, 1.0, 1e-5),
    "Bernstein": dpjax.bernstein(0.1, 1.0, degree=4, dims=2),
}


def test_densities_are_those_of_the_noise(ax):
    noise(MECHANISMS, probability=0.9, unit="mm", ax=ax)
    distributions = [stats.laplace, stats.norm, stats.laplace]
    for line, distribution, (name, mechanism) in zip(
        ax.get_lines(), distributions, MECHANISMS.items(), strict=True
    ):
        scale = mechanism.effective_scale()
        x, y = (np.asarray(part) for part in line.get_data())
        np.testing.assert_allclose(y, distribution.pdf(x, scale=scale), rtol=1e-4, atol=1e-7)
        low, high = x[line.get_markevery()]
        assert (low, high) == pytest.approx(distribution.interval(0.9, scale=scale))
        assert line.get_label() == f"{name}: 90% within ±{high:.3g}"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("noise [mm]", "probability density [1/mm]")


def test_larger_values_have_the_scale_of_their_shape(ax):
    laplace = MECHANISMS["Laplace"]
    noise({"Laplace": laplace}, shape=(10**6,), ax=ax)
    (line,) = ax.get_lines()
    peak = 1 / (2 * laplace.effective_scale((10**6,)))
    assert np.max(line.get_ydata()) == pytest.approx(peak, rel=1e-5)
    assert peak != pytest.approx(1 / (2 * laplace.effective_scale()), rel=1e-5)


def test_what_adds_no_noise_is_refused(ax):
    for other in (dpjax.exponential(1.0, 1.0), dpjax.randomized_response(1.0)):
        with pytest.raises(TypeError, match="mechanisms must add noise to numbers"):
            noise({"other": other}, ax=ax)
    with pytest.raises(ValueError, match="mechanisms must contain at least one"):
        noise({}, ax=ax)
    with pytest.raises(ValueError, match="probability must be"):
        noise(MECHANISMS, probability=1.0, ax=ax)


def test_relations_that_differ_are_in_the_legend(ax):
    query = dpjax.queries.counting_query(lambda x: x > 0)
    mechanisms = {
        relation.name: dpjax.laplace(query.sensitivity("l1", relation=relation), 1.0)
        for relation in dpjax.NeighboringRelation
    }
    noise(mechanisms, ax=ax)
    one, other = (line.get_label() for line in ax.get_lines())
    assert one.endswith(", replace-one")
    assert other.endswith(", add-or-remove-one")
