"""A release and its error bar: where they stand, and what is no such release."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax.plotting import release_with_error

LAPLACE = dpjax.laplace(0.1, 1.0)
VALUE = jnp.array([1.0, 2.0, 4.0])
RELEASE = LAPLACE(dpjax.random.seeded_key(0), VALUE)
NUMBERS = np.asarray(RELEASE.value, float)


def bars(ax):
    """Lower and upper ends."""
    (container,) = ax.containers
    return np.array([segment[:, 1] for segment in container[2][0].get_segments()]).T


@pytest.mark.parametrize("simultaneous", [False, True])
def test_bars_are_the_error(simultaneous, ax):
    release_with_error(RELEASE, probability=0.9, simultaneous=simultaneous, ax=ax)
    error = LAPLACE.error(confidence=0.9, shape=(3,), simultaneous=simultaneous)
    low, high = bars(ax)
    np.testing.assert_allclose(low, NUMBERS - error, rtol=1e-5)
    np.testing.assert_allclose(high, NUMBERS + error, rtol=1e-5)
    (container,) = ax.containers
    assert container[0].get_ydata().tolist() == NUMBERS.tolist()
    assert ("at once" in container.get_label()) == simultaneous


def test_bars_of_integers_are_not_those_of_floats(ax):
    mechanism, counts = dpjax.laplace(1.0, 1e-6), jnp.arange(1000)
    release_with_error(mechanism(dpjax.random.seeded_key(0), counts), ax=ax)
    error = mechanism.error(confidence=0.95, like=counts)
    assert error < 0.99 * mechanism.error(confidence=0.95, shape=(1000,))
    low, high = bars(ax)
    np.testing.assert_allclose(high - low, 2 * error, rtol=1e-6)


def test_truth_and_names_stand_at_their_coordinates(ax):
    release_with_error(RELEASE, VALUE + 1, names=["a", "b", "c"], unit="mm", ax=ax)
    truth = ax.get_lines()[-1]
    assert truth.get_label() == "truth, not private"
    assert truth.get_ydata().tolist() == [2.0, 3.0, 5.0]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_ylabel() == "value [mm]"


def test_without_truth_nothing_but_the_release_is_drawn(ax):
    release_with_error(RELEASE, ax=ax)
    assert {tuple(np.round(line.get_xdata(), 9)) for line in ax.get_lines()} == {(0, 1, 2)}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        ax.containers[0].get_label()
    ]


def test_a_release_of_a_table_is_drawn_with_its_columns_and_dates(ax):
    days = np.datetime64("2020-01-01") + np.arange(600) % 60
    frame = {"ward": np.repeat(["A", "B"], 300), "day": days, "minute": days.astype("M8[s]")}
    table = dpjax.PrivateTable(frame, most_rows=700)
    ends = {name: (np.datetime64("2020-01-01"), np.datetime64("2020-03-01")) for name in frame}
    for column in ("day", "minute"):
        ax.clear()
        release = table.mean(
            column,
            bounds=ends,
            by={"ward": ["A", "B"]},
            epsilon=9.0,
            key=dpjax.random.seeded_key(0),
        )
        release_with_error(release, ax=ax)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("ward", f"mean of {column} by ward")
        (container,) = ax.containers
        drawn = np.datetime64("1970-01-01") + container[0].get_ydata().round().astype("m8[D]")
        middle = np.datetime64("2020-01-30")
        assert np.all(np.abs(drawn - middle) <= np.timedelta64(2, "D"))
        low, high = bars(ax)
        assert np.all((low < container[0].get_ydata()) & (container[0].get_ydata() < high))
        assert np.all(high - low < 10)
        ax.figure.canvas.draw()
        assert "2020" in ax.yaxis.get_major_formatter().format_data(drawn[0].astype(float))


def test_names_that_do_not_fit_beside_each_other_are_slanted(ax):
    names = ["a name of a cell"] * 12
    release_with_error(
        dpjax.laplace(1.0, 1.0)(dpjax.random.seeded_key(0), np.zeros(12)), names=names, ax=ax
    )
    assert {text.get_rotation() for text in ax.get_xticklabels()} == {45.0}


def test_a_tree_is_drawn_with_the_names_of_its_parts(ax):
    release = LAPLACE(dpjax.random.seeded_key(0), {"a": VALUE, "b": VALUE[0]})
    release_with_error(release, ax=ax)
    names = [text.get_text() for text in ax.get_xticklabels()]
    assert names == ["a, 0", "a, 1", "a, 2", "b"]
    low, high = release.interval()
    assert bars(ax)[0].tolist() == [*low["a"].tolist(), float(low["b"])]
    assert bars(ax)[1].tolist() == [*high["a"].tolist(), float(high["b"])]


def test_a_release_without_an_interval_has_no_bars(ax):
    index = dpjax.exponential(1.0, 1.0)(dpjax.random.seeded_key(0), VALUE)
    release_with_error(index, ax=ax)
    assert "no interval is known" in ax.containers[0].get_label()
    assert not ax.containers[0][2]


def test_what_does_not_fit_is_refused(ax):
    text = dpjax.Release(("Bonn",), LAPLACE.guarantee)
    with pytest.raises(TypeError, match=r"release must contain numbers.*plot a release of counts"):
        release_with_error(text, ax=ax)
    frame = dpjax.Release(pd.DataFrame({"x": ["a"]}), LAPLACE.guarantee)
    with pytest.raises(TypeError, match=r"release must contain numbers.*plot the columns of rel"):
        release_with_error(frame, ax=ax)
    with pytest.raises(ValueError, match="truth must contain 3"):
        release_with_error(RELEASE, 1.0, ax=ax)
    with pytest.raises(ValueError, match="names must have 3"):
        release_with_error(RELEASE, names=["a"], ax=ax)
