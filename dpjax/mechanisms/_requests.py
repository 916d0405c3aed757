"""Requests for releases: functions of public facts, and of a name that the user gives."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax

from dpjax._fingerprints import digest
from dpjax._pytree import TreeSpec
from dpjax.base import Release
from dpjax.random._open_ledgers import Request


def request_of(
    name: str | None, draw: Callable[..., Release], key: jax.Array, value: TreeSpec, *asked: Any
) -> Request | None:
    """The request for what `draw(key, value)` releases, None without a name.

    The fingerprint is made of the name, the traced program of `draw`, and what else is asked for.
    Only the name says that two databases of one structure are the same: nobody looks at records.
    Without a name, too, `draw` is traced: what it refuses must not be paid for.

    Args:
        name: that the user gave to the records, or None.
        draw: makes the release.
        key: of the kind that is used; its words do not matter.
        value: what `draw` is given besides the key.
        *asked: fingerprints of programs, descriptions of records, and mechanisms, by their numbers.
    """
    drawn, release = jax.make_jaxpr(draw, return_shape=True)(key, value.tree())
    if name is None:
        return None
    name = str(name)  # NumPy has texts of its own.
    fingerprint = digest(name, drawn, _parameters((value, *asked)))
    return Request(name, fingerprint, TreeSpec.of(release.value))


def _parameters(value: Any) -> Any:
    """The numbers and words in a mechanism and its sensitivity; functions are in the program."""
    if isinstance(value, tuple):
        return tuple(map(_parameters, value))
    if isinstance(value, TreeSpec):
        kinds = [(leaf.shape, str(leaf.dtype)) for leaf in value.leaves]
        return str(value.structure), kinds
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _parameters(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value).__module__, type(value).__qualname__, fields
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (str, int, float)) or hasattr(value, "dtype"):
        return value
    return type(value).__name__
