"""Audited bounds: what is drawn is what was found."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dpjax import plotting
from dpjax.auditing import audit, audit_curve

# Not compiled, which would take the longest here.
BIT = {"value": jnp.asarray(0), "neighbor": jnp.asarray(1), "jit": False}


def flip(key, bit):
    return jnp.where(jax.random.bernoulli(key, 0.25), 1 - bit, bit)


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def results(key):
    return audit_curve(key, flip, samples=(3_000, 300, 1_000), **BIT)


def test_bounds_are_drawn_in_order(results, ax):
    assert plotting.audit_curve(results, ax=ax) is ax
    (line,) = ax.get_lines()
    assert line.get_xdata().tolist() == [300, 1_000, 3_000]
    assert line.get_ydata().tolist() == [results[i].epsilon for i in (1, 2, 0)]
    assert ax.get_xscale() == "log"
    assert ax.get_ylabel() == "epsilon at delta = 0"


def test_a_claim_is_a_line(results, ax):
    claimed = [dataclasses.replace(result, claimed=1.0) for result in results]
    lines = plotting.audit_curve(claimed, ax=ax).get_lines()
    assert [list(line.get_ydata()) for line in lines[1:]] == [[1.0, 1.0]]


def test_bounds_on_delta(key, ax):
    result = audit(key, flip, samples=300, at_epsilon=0.5, **BIT)
    plotting.audit_curve([result], ax=ax)
    assert ax.get_ylabel() == "delta at epsilon = 0.5"


def test_results_that_bound_different_things_are_refused(key, results, ax):
    other = audit(key, flip, samples=300, delta=0.1, **BIT)
    for bad in ([], [*results, other]):
        with pytest.raises(ValueError, match="results"):
            plotting.audit_curve(bad, ax=ax)
