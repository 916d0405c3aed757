"""Converts the database of a release to the dtypes that its target expects.

The conversion depends only on the target and on the dtypes of the columns. It never depends on the
numbers in the columns, because these are private. docs/how-to/pandas.md explains the rules to
users.
"""

import jax
import jax.numpy as jnp

from dpjax._core._columns import Numbers, is_numbers
from dpjax._core._frames import place_of
from dpjax._core._guarantee import RECORD
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import as_dtype, check_padded, exact_records
from dpjax._core._types import Database, PyTree
from dpjax._core._values import NeighboringRelation, Sensitivity, Target
from dpjax.release._known_sensitivity import knowing

_KINDS = (jnp.floating, jnp.signedinteger, jnp.unsignedinteger, jnp.bool_)


def released_records(target: Target, database: Database, sensitivity: Sensitivity) -> Database:
    """Converts a database to the records that the target expects.

    Whether this raises an error depends only on the structure, shapes and dtypes of the database,
    not on its values.
    """
    known = knowing(target)
    # Neighboring databases may differ in their number of rows if a record is added or removed, or
    # if people have different numbers of rows. Then padding must hide the number of rows.
    of_people = known is not None and known.privacy_unit != RECORD
    added = sensitivity.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if (added or of_people) and sensitivity.n is None:
        check_padded(database)
    records, n = exact_records("database", database)
    if sensitivity.n is not None and n != sensitivity.n:
        raise ValueError(
            f"database must have n={sensitivity.n} records, the number for which the sensitivity"
            f" was made, got {n}"
        )
    if sensitivity.records is not None:
        return _as_sampled(records, sensitivity.records)
    reads = "arrays" if known is None else known.reads
    if reads == "numbers":
        return records

    def array(path: tuple[object, ...], leaf: jax.Array | Numbers) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer) and isinstance(leaf, Numbers):
            if reads == "arrays":
                raise TypeError(_beyond(path, leaf))
            dtype = jnp.result_type(float) if reads == "floats" else dtype
        return as_dtype(leaf, dtype)

    return jax.tree_util.tree_map_with_path(array, records, is_leaf=is_numbers)


def _beyond(path: tuple[object, ...], leaf: Numbers) -> str:
    return (
        f"{place_of('database', path)} must have a dtype that JAX has without x64, got"
        f" {leaf.dtype}: your function would get int32, with larger numbers clamped to its range."
        ' Pass floats, by .astype("float64"), or integers within public bounds, by .clip(low,'
        ' high).astype("int32"), or leave the column out. Queries of dpjax accept all dtypes'
    )


def _as_sampled(records: Database, sampled: TreeSpec) -> Database:
    """Converts records to the dtypes of the oracle's databases, clamped to each dtype's range."""
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        records,
        is_leaf=is_numbers,
    )
    got = TreeSpec.of(arrays)
    if got.form != sampled.form:
        raise ValueError(
            f"database must have the structure and shapes of the oracle's databases, {sampled}, got"
            f" {got}"
        )

    def cast(sampled: jax.ShapeDtypeStruct, leaf: jax.Array | Numbers) -> jax.Array:
        integers = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)
        whole_as_float = integers and jnp.issubdtype(sampled.dtype, jnp.floating)
        if not whole_as_float and _kind(leaf) != _kind(sampled):
            raise TypeError(
                f"database must hold {sampled.dtype} in the array of shape {sampled.shape}, like "
                f"the databases of the oracle, got {leaf.dtype}"
            )
        return as_dtype(leaf, sampled.dtype)

    return jax.tree.map(cast, sampled.tree(), records)


def _kind(leaf: PyTree) -> list[bool]:
    return [jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS]
