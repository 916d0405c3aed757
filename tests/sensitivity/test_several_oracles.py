"""The worst of several oracles, and how many records decide a pair."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import oracles, targets

MEAN = targets.summable(lambda x: x, average=True)
SETTINGS = {"n": 20, "norm": "l1", "gamma": 0.1}


def scaled(by):
    return oracles.independent(lambda key: by * jax.random.exponential(key))


def sample(key, target, oracle, **kwargs):
    return dpjax.sample_sensitivity(key, target, oracle, **SETTINGS | kwargs)


def test_the_worst_counts_at_a_share_of_the_confidence(key):
    listed = [scaled(1.0), scaled(2.0)]
    found = sample(key, MEAN, listed, m=300)
    each = dpjax.operating_point(m=300, gamma=0.1, confidence=1 - 0.01 / 2)
    assert each.k > dpjax.operating_point(m=300, gamma=0.1).k
    assert (found.k, found.confidence, found.gamma) == (each.k, 0.99, 0.1)
    alone = sample(key, MEAN, listed[1], m=300, confidence=1 - 0.01 / 2)
    assert found.value == alone.value
    assert found.identity not in (alone.identity, None)
    assert found.identity == sample(key, MEAN, listed[::-1], m=300).identity
    assert dpjax.laplace(found, 1.0).guarantee.events[0].records == 2


def test_marginal_statements_need_no_share(key):
    found = sample(key, MEAN, (scaled(2.0), scaled(1.0)), m=300, confidence=None)
    alone = sample(key, MEAN, scaled(2.0), m=300, confidence=None)
    assert (found.k, found.confidence, found.value) == (alone.k, None, alone.value)


def test_each_has_its_file(key, tmp_path):
    listed = [scaled(1.0), scaled(2.0)]
    first, again = (sample(key, MEAN, listed, m=200, checkpoint=tmp_path / "a") for _ in range(2))
    assert first.value == again.value
    assert {file.name for file in tmp_path.iterdir()} >= {"a.oracle-0", "a.oracle-1"}


def test_a_tuple_that_is_an_oracle_is_one(key):
    class Scaled(NamedTuple):
        by: float

        def __call__(self, key, n):
            return self.by * jax.random.exponential(key, (n,))

    with pytest.raises(ValueError, match="norm must be"):
        sample(key, jnp.mean, Scaled(2.0), norm="unknown")


def test_no_oracle_or_other_records_are_refused(key):
    with pytest.raises(ValueError, match="at least one"):
        sample(key, MEAN, [])
    other = oracles.independent(lambda key: jax.random.exponential(key, (2,)))
    with pytest.raises(ValueError, match="same structure"):
        sample(key, jnp.mean, [scaled(1.0), other], m=200)


@pytest.mark.parametrize(
    ("target", "oracle", "decided"),
    [
        (MEAN, scaled(1.0), 2),
        (MEAN, lambda key, n: jax.random.exponential(key, (n,)), None),
        (targets.summable(lambda x: x, lambda total: total**2), scaled(1.0), None),
        (jnp.mean, scaled(1.0), None),
    ],
)
def test_two_records_decide_affine_sums_over_independent_records(key, target, oracle, decided):
    found = sample(key, target, oracle, m=200)
    assert found.deciding_records == decided
    guarantee = dpjax.laplace(found, 1.0).guarantee
    assert guarantee.events[0].records == decided
    if decided is None:
        with pytest.raises(ValueError, match="records=2"):
            dpjax.accounting.under_distribution_shift(guarantee, kl=1e-3, n=20, records=2)
    else:
        moved = dpjax.accounting.under_distribution_shift(guarantee, kl=1e-3, n=20, records=2)
        assert (
            moved.gamma < dpjax.accounting.under_distribution_shift(guarantee, kl=1e-3, n=20).gamma
        )
