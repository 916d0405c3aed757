"""Programs of a release that are compiled before it is paid for."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.release import _privatize


def _compiled_by(run, caplog):
    """The functions that XLA compiles during a run. Of other threads, too."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "jax._src.dispatch"):
        run()
    return [line.split()[4] for line in caplog.messages if "Finished XLA compilation" in line]


@pytest.mark.parametrize("inside", [False, True], ids=["no ledger", "in a ledger"])
@pytest.mark.parametrize("make", [dpjax.laplace, dpjax.exponential])
def test_a_release_finds_what_was_compiled_ahead(caplog, tmp_path, make, inside):
    # A target of its own, so that it is not compiled yet.
    width = 70 + 2 * inside + (make is dpjax.laplace)
    private = dpjax.privatize(lambda x: jnp.sum(x) * jnp.ones(width), make(1.0, 0.5))
    key, records = dpjax.random.secure_key(), np.ones(7)
    ledger = dpjax.Ledger(tmp_path / "budget.db", epsilon=1.0) if inside else None
    with ledger or contextlib.nullcontext():
        names = _compiled_by(lambda: private(key, records), caplog)
    assert names.count("jit(evaluate_alone)") == 1
    assert names.count("jit(draw)") <= 1
    assert names.count("jit(_add_to_padded)") <= 1


def _private_histogram(bins):
    query = dpjax.queries.histogram_query(np.linspace(0, 1, bins + 1))
    return dpjax.privatize(query, dpjax.laplace(query.sensitivity("l1", n=7), epsilon=1.0))


def test_only_queries_of_few_records_are_compiled_with_other_options(caplog, monkeypatch):
    key, records = dpjax.random.seeded_key(0), np.arange(7) / 7

    def evaluated_by(private):
        names = _compiled_by(lambda: private(key, records), caplog)
        return {name for name in names if "evaluate" in name}

    assert evaluated_by(_private_histogram(83)) == {"jit(evaluate_query)"}
    # The sensitivity of a function is that of its computed value, with the usual rounding.
    sums = dpjax.privatize(lambda x: jnp.sum(x) * jnp.ones(83), dpjax.laplace(83.0, 1.0))
    assert evaluated_by(sums) == {"jit(evaluate_alone)"}
    monkeypatch.setattr(_privatize, "_FEW", 6)
    assert evaluated_by(_private_histogram(84)) == {"jit(evaluate_alone)"}


def test_a_query_is_released_inside_of_jit_with_the_bits_of_outside(monkeypatch):
    key, records = dpjax.random.seeded_key(0), jnp.arange(7) / 7
    private = _private_histogram(85)
    outside = private(key, records).value
    try:
        inside = jax.jit(lambda: private(key, records).value)()
    except ValueError as error:  # JAX accepts compiler options only for whole programs.
        pytest.fail(str(error))
    np.testing.assert_array_equal(inside, outside)
    monkeypatch.setattr(_privatize, "_FEW", 0)
    np.testing.assert_array_equal(_private_histogram(85)(key, records).value, outside)


def test_a_draw_that_does_not_compile_is_not_paid_for(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError("no memory for XLA")

    monkeypatch.setattr(_privatize, "compile_ahead", fails)
    private = dpjax.privatize(lambda x: 3 * jnp.sum(x), dpjax.laplace(3.0, epsilon=0.5))
    with dpjax.Ledger(tmp_path / "budget.db", epsilon=1.0) as ledger:
        with pytest.raises(MemoryError):
            private(dpjax.random.secure_key(), np.ones(3))
        assert ledger.spent.epsilon == 0


def test_a_draw_that_is_refused_is_not_paid_for(tmp_path):
    # No grid carries noise of this epsilon for so many numbers.
    mechanism = dpjax.laplace(1.0, epsilon=1e-11)
    private = dpjax.privatize(lambda x: jnp.zeros(10_000) + jnp.sum(x), mechanism)
    with dpjax.Ledger(tmp_path / "budget.db", epsilon=1.0) as ledger:
        for _ in range(2):
            with pytest.raises(ValueError, match="no grid can hold noise"):
                private(dpjax.random.secure_key(), np.ones(3))
        assert ledger.spent.epsilon == 0
