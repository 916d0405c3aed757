"""What statistics make of moments without noise: units and solutions, exactly."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import NeighboringRelation, queries
from dpjax.queries import _linear_regression, _moments
from dpjax.queries._second_moments import Moments


def asked(monkeypatch, module, release):
    """How a statistic makes vectors of records, and itself of moments."""
    found = []
    monkeypatch.setattr(
        module, "released_moments", lambda key, database, *both, **_: found.extend(both)
    )
    release()
    return found


def exact_moments(vectors):
    """The moments of vectors, without noise."""
    vectors = np.asarray(vectors, float)
    mean, second = vectors.mean(axis=0), vectors.T @ vectors / len(vectors)
    return Moments(jnp.asarray(mean), jnp.asarray(second), jnp.zeros(()))


def test_a_variance_is_in_units_of_the_numbers(monkeypatch):
    numbers = np.float32([-1, 0, 2, 4, 5])
    vectors, finish = asked(
        monkeypatch,
        _moments,
        lambda: queries.private_variance(None, numbers, lower=-1, upper=5, epsilon=1.0),
    )
    made = np.asarray(vectors(jnp.asarray(numbers)))
    np.testing.assert_allclose(made[:, 0], (numbers - 2) / 3, rtol=1e-6)
    found = finish(exact_moments(made))
    assert float(found["mean"]) == pytest.approx(numbers.mean(), rel=1e-6)
    assert float(found["variance"]) == pytest.approx(numbers.var(), rel=1e-6)


@pytest.mark.parametrize(("delta", "sums"), [(None, 18), (1e-6, 9)])
@pytest.mark.parametrize("relation", list(NeighboringRelation), ids=str)
def test_a_line_is_that_of_least_squares(monkeypatch, relation, delta, sums):
    """Of sums without noise, also where n is private; a record at both radii is not clipped."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (50, 2)).astype("float32")
    x[:2] = [[3, 4], [-3, -4]]
    y = (x @ [0.5, -2] + 0.3 + 0.1 * generator.normal(size=50)).astype("float32")
    y[:2] = [-10, 10]
    asked = {}
    monkeypatch.setattr(
        _linear_regression,
        "released",
        lambda key, database, make_query, finish, **_: asked.update(make=make_query, finish=finish),
    )
    database = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    queries.private_linear_regression(
        None, database, x_radius=5.0, y_radius=10.0, epsilon=1.0, delta=delta, relation=relation
    )
    query = asked["make"](50)
    # 3 * 3 * 2 polynomials; or of 10 products, all but that of y with itself.
    assert query.shape == (sums,)
    n = jnp.float32(50) if relation is NeighboringRelation.REPLACE_ONE else None
    found = asked["finish"](query, query(database), n, 0.0)
    truth, *_ = np.linalg.lstsq(np.c_[np.ones(50), x], y, rcond=None)
    assert float(found["intercept"]) == pytest.approx(truth[0], rel=1e-3)
    np.testing.assert_allclose(found["weights"], truth[1:], rtol=1e-3)
