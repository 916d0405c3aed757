"""Programs of a release that are compiled before it is paid for."""

import contextlib
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.release import _privatize


@pytest.mark.parametrize("inside", [False, True], ids=["no ledger", "in a ledger"])
@pytest.mark.parametrize("make", [dpjax.laplace, dpjax.exponential])
def test_a_release_finds_what_was_compiled_ahead(caplog, tmp_path, make, inside):
    # A target of its own, so that it is not compiled yet.
    width = 70 + 2 * inside + (make is dpjax.laplace)
    private = dpjax.privatize(lambda x: jnp.sum(x) * jnp.ones(width), make(1.0, 0.5))
    key, records = dpjax.random.secure_key(), np.ones(7)
    ledger = dpjax.Ledger(tmp_path / "budget.db", epsilon=1.0) if inside else None
    # Of another thread, too, so not by `compilations`.
    with caplog.at_level(logging.DEBUG, "jax._src.dispatch"), ledger or contextlib.nullcontext():
        private(key, records)
    names = [line.split()[4] for line in caplog.messages if "Finished XLA compilation" in line]
    assert names.count("jit(evaluate_alone)") == 1
    assert names.count("jit(draw)") <= 1
    assert names.count("jit(_add_to_padded)") <= 1


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
