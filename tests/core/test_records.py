"""Databases as they are handed over: tables keep their columns; nothing but structure is read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax import attacks, learning, queries
from dpjax._core._records import record_arrays
from tables import no_refusal


@dataclasses.dataclass
class Nullable:
    """A column of no library we know: what NumPy makes of it depends on what is missing."""

    values: list
    dtype: str = "Int64"

    @property
    def shape(self):
        return (len(self.values),)

    def to_numpy(self):
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
        (COLUMNS, record_arrays("database", pd.DataFrame(COLUMNS))[0]),
        ({"people": [COLUMNS]}, record_arrays("database", {"people": [pd.DataFrame(COLUMNS)]})[0]),
    ):
        assert dtypes(found) == dtypes(jax.tree.map(jnp.asarray, tree))
        jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.parametrize("make", [dpjax.oracles.resample, dpjax.oracles.smoothed_resample])
def test_an_oracle_of_a_table_draws_its_columns(make, key):
    drawn = jax.eval_shape(lambda key: make(pd.DataFrame(COLUMNS))(key, 7), key)
    assert dtypes(drawn) == {"age": "float32", "visits": "int32", "ill": "bool"}
    assert {leaf.shape for leaf in drawn.values()} == {(7,)}


def test_a_table_is_released_as_its_columns(key):
    private = dpjax.privatize(lambda d: jnp.sum(d["ill"]), dpjax.laplace(1.0, 1.0))
    columns = COLUMNS | {"visits": COLUMNS["visits"].astype("int32")}
    assert private(key, pd.DataFrame(columns)).value == private(key, columns).value


def test_columns_that_numpy_converts_by_what_they_hold_are_refused():
    told = []
    for values in ([1, 2], [1, None]):
        table = {"visits": Nullable(values)}
        with pytest.raises(
            TypeError, match=r"of dtype Int64, which is not a NumPy dtype"
        ) as caught:
            record_arrays("database", table)
        told.append(str(caught.value))
    assert told[0] == told[1]


def masked(shape, dtype="float32"):
    """Ones of which the second half is hidden, and stands for something else."""
    array = np.ones(shape, dtype)
    array[len(array) // 2 :] = 0
    return np.ma.masked_array(array, mask=array == 0)


NUMBERS, VECTORS, CODES = masked(8), masked((8, 2)), masked(8, "int32")
BOUNDS, BUDGET = {"lower": 0, "upper": 1}, {"epsilon": 1.0}
LABELED = {"x": VECTORS, "y": CODES}
RADII = {"x_radius": 1.0, "y_radius": 1.0}
CLUSTERS = {"clusters": 2, "radius": 1.0, "delta": 1e-6} | BUDGET

# How records, and values and reports that are made of them, come into each room.
MASKED = {
    "record_arrays": lambda _: record_arrays("database", {"people": [NUMBERS]}),
    "sum_query": lambda _: queries.sum_query(**BOUNDS, capacity=8)(NUMBERS),
    "privatize": lambda key: dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.0))(key, NUMBERS),
    "a mechanism": lambda key: dpjax.laplace(1.0, 1.0)(key, NUMBERS),
    "reports": lambda _: queries.frequencies(CODES, dpjax.randomized_response(1.0)),
    "resample": lambda _: dpjax.oracles.resample(NUMBERS),
    "smoothed_resample": lambda _: dpjax.oracles.smoothed_resample(NUMBERS),
    "class_gaussians": lambda _: dpjax.oracles.class_gaussians(LABELED),
    "shadow_models": lambda key: attacks.shadow_models(
        key, jnp.mean, NUMBERS, query=jnp.subtract, models=2
    ),
    "counting_query": lambda _: queries.counting_query()(NUMBERS),
    "histogram_query": lambda _: queries.histogram_query([0, 1, 2])(NUMBERS),
    "contingency_query": lambda _: queries.contingency_query({"a": 2})({"a": CODES}),
    "padded_records": lambda _: queries.padded_records(NUMBERS, capacity=9),
    "present": lambda _: queries.counting_query()(queries.PaddedRecords(np.ones(8), CODES)),
    "quantiles": lambda _: queries.quantile_scores(0.5, grid=[0, 1])(NUMBERS),
    "names": lambda key: queries.name_search(1.0, width=2, threshold=1)(key, CODES),
    "mean": lambda key: queries.private_mean(key, NUMBERS, **BOUNDS, **BUDGET),
    "variance": lambda key: queries.private_variance(key, NUMBERS, **BOUNDS, **BUDGET),
    "covariance": lambda key: queries.private_covariance(key, VECTORS, radius=1.0, **BUDGET),
    "line": lambda key: queries.private_linear_regression(key, LABELED, **RADII, **BUDGET),
    "clusters": lambda key: queries.private_k_means(key, VECTORS, **CLUSTERS),
    # JAX itself refuses these.
    "a target": lambda _: dpjax.targets.bounded_mean(**BOUNDS)(NUMBERS),
    "gradients": lambda _: learning.clipped_gradients(jnp.vdot, clip_norm=1.0)(
        jnp.ones(2), VECTORS, True
    ),
    "order_statistic": lambda _: dpjax.order_statistic(NUMBERS, 3),
}


@pytest.mark.parametrize("name", MASKED)
def test_no_mask_is_dropped(name, key):
    """Converted, an array forgets its mask, and what that hides would be counted and released."""
    with pytest.raises((TypeError, ValueError), match=r"drop the mask|masked arrays are not"):
        MASKED[name](key)


def test_a_mask_that_hides_nothing_is_refused_too():
    """For whether something is missing may be private."""
    told = []
    for array in (NUMBERS, np.ma.masked_array(np.ones(8)), np.ma.masked_array(np.ones(8), False)):
        with pytest.raises(TypeError, match="filled") as caught:
            record_arrays("database", array)
        told.append(str(caught.value))
    assert len(set(told)) == 1


def test_columns_of_one_name_are_refused():
    twice = pd.DataFrame([[1, 2]], columns=["age", "age"])
    with pytest.raises(ValueError, match="distinct names"):
        record_arrays("database", twice)


def test_a_table_is_no_array(key):
    with pytest.raises(TypeError, match="got a DataFrame"):
        dpjax.laplace(1.0, 1.0)(key, pd.DataFrame(COLUMNS))


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


def test_an_empty_array_beside_others_is_no_reason_to_refuse(key):
    """Of the records, or of what a target makes of them: {"x": features, "none": no features}."""
    database = {"x": np.ones((10, 2), "float32"), "none": np.ones((10, 0), "float32")}
    private = dpjax.privatize(
        lambda d: {k: jnp.sum(x) for k, x in d.items()}, dpjax.laplace(1e-6, 1)
    )
    with no_refusal():
        released = private(key, database)
    assert released.value["x"] == pytest.approx(20, abs=1e-3)
    columns = dpjax.privatize(
        lambda d: {k: jnp.mean(x, 0) for k, x in d.items()}, dpjax.laplace(1e-6, 1)
    )
    assert columns(key, database).value["none"].shape == (0,)
    with pytest.raises(ValueError, match="must not be empty"):
        columns(key, {"none": database["none"]})
