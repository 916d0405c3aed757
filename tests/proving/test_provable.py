"""A sampled sensitivity says in one line that a proof exists, at no cost that anyone notices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import targets
from dpjax._tracing._programs import Program
from dpjax.proving import _prove_sensitivity
from dpjax.proving._prove_sensitivity import provable

NUMBERS = jax.ShapeDtypeStruct((50,), jnp.float32)
WHOLE = jax.ShapeDtypeStruct((50,), jnp.int32)
TRUTHS = jax.ShapeDtypeStruct((50,), bool)
UNIT, WIDE, ALL = (0, 1), (-(2**20), 2**20), (False, True)
CASES = {
    "mean": (jnp.mean, NUMBERS, UNIT),
    "clipped": (lambda x: jnp.clip(x, 0, 3).mean(), NUMBERS, WIDE),
    "counted": (lambda x: (x > 3).sum(), WHOLE, WIDE),
    "share": (jnp.mean, TRUTHS, ALL),
    "deviation": (jnp.std, NUMBERS, UNIT),
    "until": (lambda x: lax.while_loop(lambda y: y > 1, lambda y: y / 2, x.mean()), NUMBERS, None),
    "long loop": (lambda x: lax.fori_loop(0, 90, lambda i, y: y / 2, x.mean()), NUMBERS, None),
    "many numbers": (lambda x: (x[:, None] + jnp.zeros((1, 2000))).mean(0), NUMBERS, None),
    "long constant": (
        lambda x: jnp.cos(x.mean() + np.zeros(2**15, np.float32)).mean(),
        NUMBERS,
        None,
    ),
    "half": (jnp.mean, jax.ShapeDtypeStruct((50,), jnp.bfloat16), None),
    "public": (lambda x: jnp.ones(2), NUMBERS, None),
    "host": (targets.host(lambda x: x.mean(), output=jnp.zeros(())), NUMBERS, None),
}


def line_of(target, spec, norm="l1", estimate=0.1):
    found = provable(target, Program.trace("target", target, spec), norm, estimate)
    return None if found is None else found.summary


@pytest.mark.parametrize("case", CASES)
def test_a_line_where_a_proof_exists_and_none_elsewhere(case):
    """It has the number that `prove_sensitivity` proves for the bounds that it names."""
    target, spec, bounds = CASES[case]
    line = line_of(target, spec)
    if bounds is None:
        assert line is None
        return
    named = {UNIT: "records in [0, 1]", WIDE: "records in [-2^20, 2^20]", "all": "all records"}
    assert line.endswith(f"for {named['all' if bounds is ALL else bounds]}")
    proved = dpjax.prove_sensitivity(target, spec, bounds=bounds, norm="l1").value
    assert float(re.search("proves (.*) at gamma 0", line)[1]) == pytest.approx(proved, rel=1e-5)


def test_norms_without_a_rule_have_no_line():
    assert line_of(jnp.mean, NUMBERS, norm="range") is None
    assert line_of(jnp.mean, NUMBERS, norm=jnp.abs) is None


def test_a_bound_that_only_wide_records_have_is_no_use():
    """The mean of numbers up to 2^20 moves by 42,000."""
    assert "[0, 1]" in line_of(jnp.mean, NUMBERS, estimate=1.0)
    assert "2^20" in line_of(jnp.mean, NUMBERS, estimate=1e3)


def test_a_target_with_its_own_proof_says_so():
    target = targets.bounded_mean(lower=0, upper=3)
    bound = target.sensitivity("l1", n=50).value
    assert (
        line_of(target, NUMBERS)
        == f"its own proof gives {bound:.6g} at gamma 0: see target.sensitivity"
    )


def test_a_defect_in_a_proof_ends_no_sampling(monkeypatch):
    def broken(*arguments):
        raise AssertionError("a defect of a proof")

    monkeypatch.setattr(_prove_sensitivity, "walked_bound", broken)
    assert line_of(jnp.mean, NUMBERS) is None


def test_a_sample_says_so_in_one_line_and_compiles_nothing_for_it(monkeypatch, compilations):
    """Its bits are those of a sample that has no such line; inside jit it passes on."""

    def sample():
        return dpjax.sample_sensitivity(
            dpjax.random.seeded_key(0),
            lambda x: jnp.clip(x, 0, 3).mean(),
            lambda key, n: jax.random.exponential(key, (n,)),
            n=50, norm="l1", m=30, gamma=0.2,
        )  # fmt: skip

    found = sample()
    line = found.explain()
    assert repr(found).endswith(f"; {line})")
    assert "\n" not in repr(found)
    assert "dpjax.prove_sensitivity" in line
    assert jax.jit(lambda s: s)(found).explain() == line
    program = Program.trace("target", lambda x: jnp.clip(x, 0, 3).mean(), NUMBERS)
    assert compilations(lambda: provable(jnp.mean, program, "l1", 0.1)) == []
    monkeypatch.setattr("dpjax.sensitivity._sample_sensitivity.provable", lambda *arguments: None)
    silent = sample()
    assert (silent.value, silent.identity) == (found.value, found.identity)
    with pytest.raises(ValueError, match="must have a proof to be explained"):
        silent.explain()
