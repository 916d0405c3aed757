"""Type aliases for pytrees, keys and other values for which JAX has no static types."""

from typing import Any, TypeAlias

import jax

Key: TypeAlias = jax.Array
"""A typed key of JAX, or an array of keys where a function says so."""

PyTree: TypeAlias = Any
"""A JAX pytree: nested containers of arrays or other leaves."""

Database: TypeAlias = PyTree
"""Arrays with a common leading axis of n records, in a pytree."""

Value: TypeAlias = PyTree
"""Arrays in a pytree: the value of a target, or of a release."""

TreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which JAX exports as a variable."""

Scalar: TypeAlias = float | jax.Array
"""A Python number, or a JAX scalar while it is traced."""
