"""A release and its error bar: where they stand, and what is no such release."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core._values import Release
from dpjax.plotting import release_with_error

LAPLACE = dpjax.laplace(0.1, 1.0)
VALUE = jnp.array([1.0, 2.0, 4.0])
RELEASE = Release(VALUE, LAPLACE.guarantee)


def bars(ax):
    """Lower and upper ends."""
    (container,) = ax.containers
    return np.array([segment[:, 1] for segment in container[2][0].get_segments()]).T


@pytest.mark.parametrize("simultaneous", [False, True])
def test_bars_are_the_error(simultaneous, ax):
    release_with_error(RELEASE, LAPLACE, probability=0.9, simultaneous=simultaneous, ax=ax)
    error = LAPLACE.error(confidence=0.9, shape=(3,), simultaneous=simultaneous)
    low, high = bars(ax)
    np.testing.assert_allclose(low, np.asarray(VALUE) - error, rtol=1e-6)
    np.testing.assert_allclose(high, np.asarray(VALUE) + error, rtol=1e-6)
    (container,) = ax.containers
    assert container[0].get_ydata().tolist() == VALUE.tolist()
    assert ("at once" in container.get_label()) == simultaneous


def test_bars_of_integers_are_not_those_of_floats(ax):
    mechanism, counts = dpjax.laplace(1.0, 1e-6), jnp.arange(1000)
    release_with_error(Release(counts, mechanism.guarantee), mechanism, ax=ax)
    error = mechanism.error(confidence=0.95, like=counts)
    assert error < 0.99 * mechanism.error(confidence=0.95, shape=(1000,))
    low, high = bars(ax)
    np.testing.assert_allclose(high - low, 2 * error, rtol=1e-6)


def test_truth_and_names_stand_at_their_coordinates(ax):
    release_with_error(RELEASE, LAPLACE, VALUE + 1, names=["a", "b", "c"], unit="mm", ax=ax)
    truth = ax.get_lines()[-1]
    assert truth.get_label() == "truth, not private"
    assert truth.get_ydata().tolist() == [2.0, 3.0, 5.0]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_ylabel() == "value [mm]"


def test_without_truth_nothing_but_the_release_is_drawn(ax):
    release_with_error(RELEASE, LAPLACE, ax=ax)
    assert {tuple(np.round(line.get_xdata(), 9)) for line in ax.get_lines()} == {(0, 1, 2)}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        ax.containers[0].get_label()
    ]


def test_what_has_no_error_bar_is_refused(ax):
    index = Release(jnp.asarray(3), LAPLACE.guarantee)
    polynomial = Release(dpjax.BernsteinPolynomial(VALUE), LAPLACE.guarantee)
    for release, mechanism in (
        (index, dpjax.exponential(1.0, 1.0)),
        (index, dpjax.randomized_response(1.0)),
        (polynomial, dpjax.bernstein(1.0, 1.0, degree=2, dims=1)),
        (Release({"a": VALUE}, LAPLACE.guarantee), LAPLACE),
    ):
        with pytest.raises(TypeError, match="release must be an array with additive noise"):
            release_with_error(release, mechanism, ax=ax)
    with pytest.raises(ValueError, match="truth must have the shape"):
        release_with_error(RELEASE, LAPLACE, 1.0, ax=ax)
    with pytest.raises(ValueError, match="names must be 3"):
        release_with_error(RELEASE, LAPLACE, names=["a"], ax=ax)
