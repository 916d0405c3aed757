"""The check of mechanisms whose value is one array with one axis."""

import jax

from dpjax._core._types import Value


def check_one_array(value: Value, wanted: str) -> None:
    """Refuses any other value; `wanted` says in a message what the array holds."""
    if not jax.tree_util.all_leaves([value]) or value.ndim != 1:
        raise ValueError(
            f"value must be one array of {wanted}, got"
            f" {jax.tree.map(lambda leaf: leaf.shape, value)}; use jax.vmap for a batch"
        )
