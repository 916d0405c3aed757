"""Time: a rejection sampler takes longer for larger noise, a table does not."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax

RELEASES = 3000


def rank_correlation(release, keys):
    """Of |noise| and the time that a batch of one takes."""
    release(keys[0]).block_until_ready()
    noises, times = [], []
    for key in keys:
        start = time.perf_counter_ns()
        released = release(key).block_until_ready()
        times.append(time.perf_counter_ns() - start)
        noises.append(abs(float(released)))
    return stats.spearmanr(noises, times).statistic


@pytest.fixture(scope="module")
def batch():
    keys = jax.random.split(dpjax.random.seeded_key(11), RELEASES)
    return [keys[i] for i in range(RELEASES)]


def counting(key):
    """The control: a geometric variable by a loop, one coin after the other, scale 200."""

    def again(state):
        return state[1]

    def toss(state):
        count, _, key = state
        key, coin = jax.random.split(key)
        return count + 1, jax.random.uniform(coin) < np.exp(-1 / 200), key

    threefry = jax.random.wrap_key_data(jax.random.key_data(key)[:2], impl="threefry2x32")
    count, _, _ = jax.lax.while_loop(again, toss, (jnp.int32(-1), jnp.bool_(True), threefry))
    return count.astype(jnp.float32)


@pytest.mark.slow
def test_the_time_of_a_loop_gives_its_noise_away(batch):
    assert rank_correlation(jax.jit(counting), batch[:500]) > 0.5


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_the_time_of_a_release_tells_nothing(name, batch):
    mechanism = {"laplace": dpjax.laplace(1.0, 1.0), "gaussian": dpjax.gaussian(1.0, 1.0, 1e-5)}
    release = jax.jit(lambda key: mechanism[name](key, jnp.float32(0)).value)
    # The standard error of 3,000 pairs is .018: .1 is five of them.
    assert abs(rank_correlation(release, batch)) < 0.1


@pytest.mark.parametrize(
    ("mechanism", "dtype"),
    [
        (dpjax.laplace(1.0, 1.0), "float32"),
        (dpjax.gaussian(1.0, 1.0, 1e-5), "int32"),
        (dpjax.permute_and_flip(1.0, 1.0), "int32"),
        (dpjax.randomized_response(1.0, categories=3), "int32"),
        (dpjax.above_threshold(1.0, 1.0, threshold=0.0, positives=3), "float32"),
    ],
    ids=["laplace", "gaussian", "permute-and-flip", "randomized response", "above threshold"],
)
def test_nothing_drawn_or_private_is_divided(mechanism, dtype):
    """A processor's division of integers may take longer for a larger quotient."""

    def release(key, value, mechanism):
        return mechanism(key, value).value

    key = dpjax.random.seeded_key(11)
    program = str(jax.make_jaxpr(release)(key, jnp.zeros(7, dtype), mechanism))
    # What is public, divisors and scales, are scalars.
    assert re.search(r"[iu]32\[\] = div", program)
    assert not re.search(r"[iu]32\[\d[^]]*\] = (div|rem)", program)
