"""What noise must cover: the same in a draw, in the checks before it, and in what is stated."""

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE
from dpjax.random._grid_fit import Calibration

MIXED = {
    "float32": jnp.zeros((5, 1)),
    "bfloat16": jnp.zeros(3, "bfloat16"),
    "int32": jnp.zeros(2, "int32"),
    "bool": jnp.zeros((), bool),
}
LATTICES = [jnp.zeros((4, 4), dtype) for dtype in ("float32", "int32", "float16")]
FIELDS = ("scale", "sensitivity", "epsilon", "rounding", "coordinates")
# The norm of ones in all that is rounded, and how many get noise of the tables: in a selection one
# option at a time does, on both of the neighbors.
COVERED = {
    "l1": (dpjax.laplace(0.3, 0.7), MIXED, (0.3 / 0.7, 0.3, 0.7, 8, 11)),
    "l2": (
        additive(0.3, 0.7, norm="l2", noise=LAPLACE, multiplier=lambda e, _: 11**0.5 / e),
        MIXED,
        (0.3 * 11**0.5 / 0.7, 0.3, 0.7, 8**0.5, 11),
    ),
    "lattices": (
        dpjax.bernstein(0.3, 0.7, degree=3, dims=2),
        LATTICES,
        (48 * 0.3 / 0.7, 48 * 0.3, 0.7, 48, 48),
    ),
    "scores": (dpjax.exponential(0.3, 0.7), jnp.zeros(5), (2 * 0.3 / 0.7, 0.3, 0.7, 1, 2)),
    "counts": (
        dpjax.permute_and_flip(0.3, 0.7),
        jnp.zeros(5, "int32"),
        (2 * 0.3 / 0.7, 0.3, 0.7, 0, 2),
    ),
}


@pytest.mark.parametrize("name", COVERED)
def test_draws_checks_and_answers_cover_the_same(name, key, monkeypatch):
    mechanism, value, expected = COVERED[name]
    used = []

    def recorded(method):
        def record(self, *arguments):
            used.append(self)
            return method(self, *arguments)

        return record

    for method in ("fit", "fits"):
        monkeypatch.setattr(Calibration, method, recorded(getattr(Calibration, method)))
    for step in (
        lambda key: mechanism._draw(key, value),
        lambda _: mechanism._check_value(value),
        lambda _: mechanism.effective_scale(like=value),
    ):
        used.clear()
        jax.eval_shape(step, key)  # Traced, so that nothing is compiled.
        assert used
        for calibration in used:
            found = [getattr(calibration, field) for field in FIELDS]
            assert found == pytest.approx(expected, rel=1e-12)
