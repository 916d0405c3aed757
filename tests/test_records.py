"""Databases as they are handed over: tables keep their columns; nothing but structure is read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._records import record_arrays


class Table:
    """What pandas' DataFrame is to us, which no test needs to install."""

    def __init__(self, columns):
        self._columns = columns

    @property
    def columns(self):
        return list(self._columns)

    @property
    def dtypes(self):
        return {name: column.dtype for name, column in self._columns.items()}

    def __getitem__(self, name):
        return Column(self._columns[name])

    def to_numpy(self):
        return np.array(list(self._columns.values())).T  # One dtype for all.

    __array__ = to_numpy


class Column:
    """What pandas' Series is to us."""

    def __init__(self, values):
        self._values = values
        self.dtype = values.dtype
        self.shape = values.shape

    def to_numpy(self):
        return self._values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._values, dtype)


@dataclasses.dataclass
class Nullable:
    """Values with a mask, as pandas' Int64: what NumPy makes of them depends on what is missing."""

    values: list
    dtype: str = "Int64"

    @property
    def shape(self):
        return (len(self.values),)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values)


COLUMNS = {
    "age": np.array([31.5, 44.0, 58.0, 20.0], "float32"),
    "visits": np.array([1, 2, 3, 4]),
    "ill": np.array([False, True, True, False]),
}


def dtypes(tree):
    return jax.tree.map(lambda leaf: str(leaf.dtype), tree)


def test_a_table_becomes_its_columns():
    for tree, found in (
        (COLUMNS, record_arrays("database", Table(COLUMNS))[0]),
        ({"people": [COLUMNS]}, record_arrays("database", {"people": [Table(COLUMNS)]})[0]),
    ):
        assert dtypes(found) == dtypes(jax.tree.map(jnp.asarray, tree))
        jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.parametrize("make", [dpjax.oracles.resample, dpjax.oracles.smoothed_resample])
def test_an_oracle_of_a_table_draws_its_columns(make, key):
    drawn = jax.eval_shape(lambda key: make(Table(COLUMNS))(key, 7), key)
    assert dtypes(drawn) == {"age": "float32", "visits": "int32", "ill": "bool"}
    assert {leaf.shape for leaf in drawn.values()} == {(7,)}


def test_a_table_is_released_as_its_columns(key):
    private = dpjax.privatize(lambda d: jnp.sum(d["visits"]), dpjax.laplace(1.0, 1.0))
    assert private(key, Table(COLUMNS)).value == private(key, COLUMNS).value


def test_columns_that_numpy_converts_by_what_they_hold_are_refused():
    told = []
    for values in ([1, 2], [1, None]):
        table = Table({"visits": Nullable(values)})
        with pytest.raises(TypeError, match=r"of dtype Int64, which is none of NumPy's") as caught:
            record_arrays("database", table)
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_columns_of_one_name_are_refused():
    class Twice(Table):
        columns = ("age", "age")

    with pytest.raises(ValueError, match="names of their own"):
        record_arrays("database", Twice(COLUMNS))


def test_a_table_is_no_array():
    with pytest.raises(TypeError, match="got a Table"):
        dpjax.exact_sum(Table(COLUMNS), lower=0, upper=1, grid=1)


@pytest.mark.parametrize(
    ("database", "least"),
    [
        (np.float32(1.0), 1),
        ([1.0, 2.0], 1),
        ({"a": np.zeros(3), "b": 1.0}, 1),
        ({"a": np.zeros(3), "b": np.zeros(4)}, 1),
        (np.zeros(1), 2),
    ],
)
def test_arrays_without_a_common_axis_are_refused(database, least):
    count = "n" if least == 1 else "at least 2"
    with pytest.raises(ValueError, match=f"common leading axis of {count} records"):
        record_arrays("database", database, least=least)
