"""Batches, as indices and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import learning


def drawn(batch):
    """The indices in all slots, and which slots hold a record."""
    return np.asarray(batch.indices), np.asarray(batch._mask)


def words_of(key, n):
    """The words that decide who joins."""
    return np.asarray(jax.random.bits(jax.random.split(key)[0], (n,), "uint32"))


def test_every_record_joins_with_its_rate(keys):
    """Off by 4% with probability 4e-8; a rate that is off by 10% is found."""
    n, batch_size = 200_000, 20_000
    sampling = learning.poisson_sampling(n, batch_size=batch_size)
    indices, mask = drawn(sampling(keys(0)))
    joined = indices[mask]
    assert abs(len(joined) / batch_size - 1) < 0.04
    assert len(np.unique(joined)) == len(joined)
    # In every tenth of the records, too: 16 standard deviations are 10%.
    tenths = np.histogram(joined, bins=10, range=(0, n))[0]
    assert np.all(np.abs(tenths / (batch_size / 10) - 1) < 0.12)
    assert sampling.rate == int(0.1 * 2**32) / 2**32
    assert sampling.batch_size == pytest.approx(batch_size)


def test_batches_of_two_keys_are_independent(keys):
    """They share 400 +- 20 of 2000 of 10,000 records."""
    sampling = learning.poisson_sampling(10_000, batch_size=2_000)
    one, other = (
        set(indices[mask].tolist())
        for indices, mask in map(drawn, map(jax.jit(sampling), map(keys, (1, 2))))
    )
    assert abs(len(one & other) - 400) < 120


def test_a_batch_is_cut_off_at_its_capacity(keys):
    sampling = learning.poisson_sampling(1000, batch_size=500, capacity=100)
    indices, mask = drawn(sampling(keys(0)))
    assert indices.shape == mask.shape == (100,)
    assert np.all(mask)
    assert len(set(indices.tolist())) == 100


@pytest.mark.parametrize(
    ("batch_size", "capacity"), [(5, None), (5, 4), (0.001, None), (500, 1000), (999.9, 1000)]
)
def test_a_batch_has_the_records_of_its_draw_and_nobody_else(batch_size, capacity, keys):
    """By words and comparisons of its own; in the third batch nobody is, in two some are cut off.

    What else the count reaches: no record fills two slots, and an empty slot is masked.
    """
    n = 1000
    sampling = learning.poisson_sampling(n, batch_size=batch_size, capacity=capacity)
    for seed in range(5):
        words = words_of(keys(seed), n).astype(np.float64)
        joins = np.flatnonzero(words < np.floor(batch_size / n * 2**32))[: sampling.capacity]
        indices, mask = drawn(sampling(keys(seed)))
        assert np.array_equal(np.sort(indices[mask]), joins)
        assert np.array_equal(mask, np.arange(sampling.capacity) < len(joins))
        assert np.all((indices >= 0) & (indices < n))


def test_a_word_at_the_rate_does_not_join(keys):
    """A rate of w / 2^32 is the probability of a word below w."""
    words = words_of(keys(0), 100)
    sampling = learning.BatchSampling("poisson", 100, int(words[7]) / 2**32, 100)
    indices, mask = drawn(sampling(keys(0)))
    assert np.array_equal(np.sort(indices[mask]), np.flatnonzero(words < words[7]))


@pytest.mark.parametrize(("n", "rate"), [(7, 1.0), (1000, 2**-32), (2**31 - 1, 0.01 - 1e-17)])
def test_rates_are_multiples_that_are_not_above(n, rate):
    sampling = learning.poisson_sampling(n, batch_size=n * rate)
    assert 0 <= rate - sampling.rate < 2**-32
    assert (sampling.rate * 2**32).is_integer()


@pytest.mark.parametrize(("n", "batch_size"), [(10**4, 100), (10**6, 1), (50, 49), (1000, 3e-7)])
def test_a_batch_exceeds_its_capacity_rarely_and_no_smaller_one_does(n, batch_size):
    sampling = learning.poisson_sampling(n, batch_size=batch_size)
    exceeds = [stats.binom.sf(sampling.capacity - less, n, sampling.rate) for less in (0, 2)]
    assert exceeds[0] < 1e-15
    assert exceeds[1] > 1e-15 or sampling.capacity == n


def test_words_are_compared_as_a_whole(keys):
    """Of 300,000 words ten pairs or so agree in their first 32 bits: the others decide."""
    n = 300_000
    words = np.asarray(jax.random.bits(keys(0), (4, n), "uint32"))
    assert len(np.unique(words[0])) < n - 3
    order = np.lexsort(words[::-1])
    indices, mask = drawn(learning.fixed_size_sampling(n, batch_size=n)(keys(0)))
    assert np.array_equal(indices, order)
    assert np.all(mask)


def test_a_batch_needs_its_mask(keys):
    """Without one, every empty slot would count record 0 once more: 35 times in this batch."""

    def loss(w, x):
        return jnp.dot(w, x)

    sampling = learning.poisson_sampling(1000, batch_size=20)
    batch = sampling(keys(0))
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    nobody, someone = jnp.zeros((1000, 2)), jnp.zeros((1000, 2)).at[0].set(1)
    for forgotten in ((), (None,)):
        with pytest.raises(ValueError, match=r"batch.* or True if no slot is"):
            clipped(jnp.zeros(2), someone[batch.indices], *forgotten)
    sums = [clipped(jnp.zeros(2), database[batch.indices], batch) for database in (nobody, someone)]
    assert jnp.linalg.norm(sums[1].value - sums[0].value) <= sums[0].norm_bound


@pytest.mark.parametrize("rate", [0.5, 1.0])
@pytest.mark.parametrize("capacity", [None, 40])
def test_an_empty_slot_joins_no_batch(rate, capacity, keys):
    """And takes the place of nobody: a batch has the present ones that it would have anyway.

    What else reaches it: full batches, whose words nobody draws; batches that are cut off; parts.
    """
    n = 100
    sampling = learning.poisson_sampling(n, batch_size=n * rate, capacity=capacity)
    present = np.arange(n) % 3 > 0
    everyone = learning.poisson_sampling(n, batch_size=n * rate, capacity=n)
    indices, mask = drawn(everyone(keys(4)))
    wanted = [i for i in sorted(indices[mask].tolist()) if present[i]][: sampling.capacity]
    indices, mask = drawn(jax.jit(sampling)(keys(4), jnp.asarray(present)))
    assert sorted(indices[mask].tolist()) == wanted
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    total = learning.clipped_in_parts(
        keys(4),
        clipped,
        jnp.zeros(n),
        sampling=sampling,
        examples=lambda indices: jnp.eye(n)[indices],
        parts=3,
        present=present,
    )
    np.testing.assert_allclose(total.value, np.eye(n)[wanted].sum(0), atol=1e-3)


def test_everyone_joins_at_rate_one(keys):
    sampling = learning.poisson_sampling(50, batch_size=50)
    indices, mask = drawn(sampling(keys(0)))
    assert sorted(indices.tolist()) == list(range(50))
    assert np.all(mask)


@pytest.mark.parametrize("batch_size", [4, 3])
def test_the_records_of_a_batch_are_in_a_uniform_order(batch_size, keys):
    """So one record less leaves all others in their slots, but for the last, which takes its place.

    Chi-square of all orders of four records: 23 degrees of freedom, beyond 80 with 3e-8. In the
    order of the database a record less moves all behind it, and regroups what floats add up.
    What else reaches it: full batches, where nobody draws who joins; empty slots come last.
    """
    sampling = learning.poisson_sampling(4, batch_size=batch_size, capacity=4)
    indices, mask = drawn(jax.jit(jax.vmap(sampling))(jax.random.split(keys(5), 8000)))
    assert np.all(mask[:, :-1] >= mask[:, 1:])
    full = indices[np.all(mask, axis=1)]
    _, counts = np.unique(full, axis=0, return_counts=True)
    assert len(counts) == 24
    expected = len(full) / 24
    assert np.sum((counts - expected) ** 2) / expected < 80


def test_batches_of_a_fixed_size_are_uniform(keys):
    """Chi-square of 4000 draws of 5 out of 20: 19 degrees of freedom, beyond 60 with 4e-6."""
    sampling = learning.fixed_size_sampling(20, batch_size=5)
    indices, mask = drawn(jax.jit(jax.vmap(sampling))(jax.random.split(keys(3), 4000)))
    assert np.all(mask)
    assert all(len(set(row)) == 5 for row in indices[:100].tolist())
    counts = np.bincount(np.ravel(indices), minlength=20)
    # Without replacement: the variance of a count is 4000 p (1 - p) and not 4000 p.
    assert np.sum((counts - 1000) ** 2) / (1000 * 0.75) * 19 / 20 < 60


def test_samplings_are_checked(keys):
    for arguments, message in (
        ({"batch_size": 11}, "batch_size must be at most n=10"),
        ({"batch_size": 1e-10}, "batch_size must be at most n=10, and so large"),
        ({"batch_size": 5, "capacity": 11}, "capacity must be"),
    ):
        with pytest.raises(ValueError, match=message):
            learning.poisson_sampling(10, **arguments)
    with pytest.raises(ValueError, match="batch_size must be"):
        learning.fixed_size_sampling(10, batch_size=11)
    for present in (jnp.ones(9, bool), jnp.ones(10), jnp.ones((10, 1), bool), True):
        with pytest.raises(ValueError, match=r"present must be booleans of shape \(10,\)"):
            learning.poisson_sampling(10, batch_size=5)(keys(0), present)
    with pytest.raises(ValueError, match="present must be None for batches of a fixed size"):
        learning.fixed_size_sampling(10, batch_size=5)(keys(0), jnp.ones(10, bool))
    with pytest.raises(TypeError, match="chacha20"):
        learning.poisson_sampling(10, batch_size=5)(jax.random.key(0))
