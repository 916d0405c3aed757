"""Oracles take public records and weights: nothing that they hide is dropped, nothing wraps."""

import jax
import numpy as np
import pytest

import odd_inputs
from dpjax import oracles
from dpjax.random import seeded_key

WHOLE = np.asarray([1.0, 2.0, 3.0, 1.0, 7.0, 2.0, 1.0, 4.0])
LABELS = np.asarray([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
PLANE = np.stack([WHOLE, WHOLE[::-1]], axis=1)
KEY = seeded_key(13)


def drawn(oracle):
    return oracle(KEY, 4)


TABLE = {
    "resample, records": (lambda x: drawn(oracles.resample(x)), WHOLE),
    "resample, weights": (lambda x: drawn(oracles.resample(WHOLE, x)), WHOLE),
    "smoothed_resample, records": (lambda x: drawn(oracles.smoothed_resample(x)), WHOLE),
    "class_gaussians, x": (
        lambda x: drawn(oracles.class_gaussians({"x": x, "y": LABELS.astype(int)})),
        PLANE,
    ),
    "class_gaussians, y": (
        lambda y: drawn(oracles.class_gaussians({"x": PLANE, "y": y})),
        LABELS,
    ),
    "mixture, weights": (
        lambda x: drawn(oracles.mixture([lambda key: jax.random.normal(key)] * 8, x)),
        WHOLE,
    ),
}
every = pytest.mark.parametrize("name", TABLE)


@every
def test_what_hides_something_is_refused(name):
    entry, plain = TABLE[name]
    odd_inputs.assert_refused(
        entry, odd_inputs.hiding_in_columns(plain), r"records|weights|\b[xy]\b"
    )


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@every
def test_the_same_numbers_give_the_same_draws(name, x64):
    entry, plain = TABLE[name]
    with jax.enable_x64(x64):
        right = entry(plain.astype("float32"))
        odds = [x for x in odd_inputs.written_otherwise(plain) if not has_other_noise(name, x)]
        # float16 of records keeps its dtype: draws are rounded to it.
        odd_inputs.assert_right(entry, odds, "records|weights|x|y", lambda _: right, tolerance=2e-2)


def has_other_noise(name, odd):
    """Noise is drawn in the dtype of the records, so another dtype has other bits of it."""
    own = name.startswith("smoothed") or name == "class_gaussians, x"
    return "float8" in odd.name or (
        own and np.dtype(odd.array.dtype).newbyteorder("=") != "float32"
    )


@pytest.mark.slow
def test_every_key_draws_or_is_refused():
    oracle = oracles.resample(WHOLE)
    for name, key in odd_inputs.every_key():
        if name in ("several", "a number", "none"):
            with pytest.raises((TypeError, ValueError)):
                oracle(key, 4)
        elif name.endswith("rbg"):
            with pytest.raises(ValueError, match=f"record must not draw with {name} keys"):
                oracle(key, 4)
        else:
            assert set(np.asarray(oracle(key, 4)).tolist()) <= set(WHOLE.tolist()), name
