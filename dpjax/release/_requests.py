"""Requests for releases: functions of public facts, and of a name that the user gives."""

import dataclasses
import enum
from collections.abc import Callable

import jax

from dpjax._core._open_ledgers import Request
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, Value
from dpjax._tracing._fingerprints import digest


def request_of(
    name: str | None,
    draw: Callable[[Key, Value], Value],
    key: Key | jax.ShapeDtypeStruct,
    value: TreeSpec,
    *asked: object,
) -> Request | None:
    """The request for the value that `draw(key, value)` releases, None without a name.

    The fingerprint covers the name, the traced program of `draw`, and `asked`. Records are not
    looked at: two databases of one structure and one name count as the same.
    `draw` is traced without a name too: a release that it refuses must not be paid for.

    Args:
        name: the user's name for the records, or None.
        draw: draws the value.
        key: of the kind that is used; its words do not matter.
        value: describes the second argument of `draw`.
        *asked: fingerprints of programs, descriptions of records, and mechanisms, by their numbers.
    """
    drawn, released = jax.make_jaxpr(draw, return_shape=True)(key, value.tree())
    if name is None:
        return None
    name = str(name)  # NumPy has texts of its own.
    fingerprint = digest(name, drawn, _parameters((value, *asked)))
    return Request(name, fingerprint, TreeSpec.of(released))


def _parameters(value: object) -> object:
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
