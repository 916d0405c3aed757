"""The key of a cell is a function of names, values and repeat, and of nothing else."""

import enum
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.sweeps._axes import cell_keys, fingerprint_of_cell, fingerprint_of_value, words_of_cells


class Kind(enum.Enum):
    NEAR = 1
    FAR = 2


def named():
    """A function that stands on an axis."""


ALIKE = [
    (1, 1.0, np.float32(1), np.int64(1), jnp.int32(1), jnp.float32(1), np.array(1.0)),
    (0.0, -0.0, 0, np.float32(-0.0)),
    (0.1, np.float32(0.1), jnp.float32(0.1), np.float64(0.1)),
    (np.inf, np.float32(np.inf)),
    (True, np.bool_(True), jnp.bool_(True)),
    ("named", named),
    ("FAR", Kind.FAR),
    ((1, "a"), [1.0, "a"]),
    (np.ones(3), jnp.ones(3), np.ones(3, np.float32)),
]
# One of each, and what looks like them.
DISTINCT = [
    *(values[0] for values in ALIKE),
    *(2, 10**12, 10**12 + 1, -1, 0.5, -np.inf, 1e-30, False, None, "None", "True", "1", ""),
    *((1,), (1, 1), ((1,), 1), {"a": 1}, {"b": 1}, Kind.NEAR, np.ones(4), np.ones((3, 1))),
    *(np.zeros(3), -np.zeros(3), np.ones(3, np.int32), np.full(3, np.nan)),
]


@pytest.mark.parametrize("values", ALIKE)
def test_what_a_function_sees_alike_is_one_coordinate(values):
    assert len({fingerprint_of_value("x", value) for value in values}) == 1


def test_all_else_is_distinct():
    found = {fingerprint_of_value(name, value) for name in ("x", "y", "") for value in DISTINCT}
    assert len(found) == 3 * len(DISTINCT)


def test_float64_is_seen_where_there_is_float64(x64):
    assert fingerprint_of_value("x", 0.1) != fingerprint_of_value("x", np.float32(0.1))
    assert fingerprint_of_value("x", 0.5) == fingerprint_of_value("x", np.float32(0.5))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.nan, ValueError, "x must not contain NaN"),
        (np.float64(1e300), ValueError, "x must fit float32"),
        (np.int64(2**40), ValueError, "x must fit int32"),
        (1j, TypeError, "x must contain real numbers"),
        (object(), TypeError, "x must contain real numbers"),
    ],
)
def test_what_is_no_coordinate_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        fingerprint_of_value("x", value)


KEYS = {
    "secure": lambda: dpjax.random.secure_key(),
    "seeded": lambda: dpjax.random.seeded_key(0),
    "threefry": lambda: jax.random.key(0),
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_keep_their_kind_and_never_meet(kind):
    key = KEYS[kind]()
    grid = [
        fingerprint_of_cell([fingerprint_of_value("a", a), fingerprint_of_value("b", b)])
        for a, b in itertools.product(range(40), range(40))
    ]
    keys = cell_keys(key, words_of_cells(grid, np.arange(10)))
    assert jax.random.key_impl(keys) == jax.random.key_impl(key)
    data = np.asarray(jax.random.key_data(keys))
    assert len(np.unique(data, axis=0)) == 16_000
    assert not (data == np.asarray(jax.random.key_data(key))).all(1).any()
    one = dpjax.cell_key(key, {"b": 7.0, "a": jnp.float32(3)}, repeat=4)
    assert bool(one == keys[(3 * 40 + 7) * 10 + 4])


def test_fingerprints_of_a_big_grid_never_meet():
    axes = [[fingerprint_of_value(name, i / 7) for i in range(60)] for name in "abc"]
    cells = [fingerprint_of_cell(cell) for cell in itertools.product(*axes)]
    assert len(set(cells)) == 60**3


def test_base_keys_matter():
    keys = [dpjax.cell_key(jax.random.key(seed), {"a": 1}) for seed in (0, 1)]
    assert not bool(keys[0] == keys[1])


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_bits_depend_on_the_batch_are_refused(impl):
    with pytest.raises(TypeError, match=f"got {impl}"):
        dpjax.cell_key(jax.random.key(0, impl=impl), {"a": 1})


def test_a_repeat_is_counted_from_0():
    with pytest.raises(ValueError, match="repeat must be"):
        dpjax.cell_key(jax.random.key(0), {}, repeat=-1)
