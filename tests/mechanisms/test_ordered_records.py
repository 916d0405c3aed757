"""Local sensitivity of quantiles at a distance, against all databases of a small universe."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.mechanisms._smooth_quantile import (
    OrderedRecords,
    discounts,
    rank_of,
    replacements_until,
    smooth_bound,
)
from dpjax.targets import quantile

WIDTH, COUNT, DECAY = 3, 3, 0.4
UNIVERSE = np.array(list(itertools.product(range(WIDTH + 1), repeat=COUNT)))
DISTANCES = np.sum(UNIVERSE[:, None] != UNIVERSE[None], axis=2)


def local_sensitivities(rank):
    """By definition: how far the quantile of any neighbor is."""
    quantiles = np.sort(UNIVERSE, axis=1)[:, rank - 1]
    gaps = np.abs(quantiles[:, None] - quantiles[None])
    return np.max(np.where(DISTANCES <= 1, gaps, 0), axis=1)


def of_every_database(function):
    def one(database):
        return function(OrderedRecords.of(database, (0.0, float(WIDTH)), jnp.int32(0)))

    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(UNIVERSE, "float32")))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_smooth_bound_is_that_of_the_definition(rank):
    exact = np.max(local_sensitivities(rank)[None] * np.exp(-DECAY * DISTANCES), axis=1)
    found = of_every_database(lambda records: smooth_bound(records, rank, DECAY))
    np.testing.assert_allclose(found, np.maximum(exact, 1), rtol=1e-6)
    assert len(np.unique(found)) > 3


def test_quotients_of_discounts_are_within_their_margin():
    """Whatever a device makes of the exponential, down to where nothing counts any more."""
    every = jax.jit(lambda decays: jax.vmap(lambda decay: discounts(decay, 10_000))(decays))
    decays = np.geomspace(2.0**-13, 1, 50).astype("float32")
    factors = np.asarray(every(decays), float)
    assert np.all(factors[:, 0] == 1)
    counted = factors[:, :-1] >= 2.0**-25
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.log(factors[:, :-1] / factors[:, 1:]) - decays[:, None]
    assert 0 < losses[counted].max() < 2.0**-16


def test_distances_are_those_of_the_definition():
    def every(records):
        return jnp.stack(
            [replacements_until(records, rank, jnp.int32(b)) for rank in (1, 2, 3) for b in (1, 2)]
        )

    found = of_every_database(every).T
    cases = [(rank, bound) for rank in (1, 2, 3) for bound in (1, 2)]
    for (rank, bound), distance in zip(cases, found, strict=True):
        unstable = local_sensitivities(rank) > bound
        exact = np.min(np.where(unstable[None], DISTANCES, COUNT + 1), axis=1)
        np.testing.assert_array_equal(distance, exact)


def test_a_bound_that_always_holds_is_as_far_as_can_be():
    found = of_every_database(lambda records: replacements_until(records, 2, jnp.int32(WIDTH)))
    np.testing.assert_array_equal(found, COUNT + 1)


STRANGE = np.array([np.nan, np.inf, -np.inf, 0.26, 3e38, 0.75, -0.75, 1.0, -1.0, 0.0], "float32")


@pytest.fixture(scope="module")
def in_order():
    steps = jax.jit(lambda x: OrderedRecords.of(x, (-1.0, 1.0), jnp.int32(-1)).steps)
    return lambda numbers: np.asarray(steps(jnp.asarray(numbers, "float32")))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.51, 0.99])
def test_the_quantile_is_that_of_the_target(probability, in_order):
    numbers = np.random.default_rng(0).integers(-4, 4, size=STRANGE.size) / 2
    rank = rank_of(probability, STRANGE.size)
    exact = quantile(probability=probability, lower=-1, upper=1)(jnp.asarray(numbers, "float32"))
    assert float(exact) == -1 + in_order(numbers)[rank] / 2


def test_records_are_clamped_and_rounded_one_by_one(in_order):
    # Halves go up, and there is one more number at either end.
    np.testing.assert_array_equal(in_order(STRANGE), [0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4])
