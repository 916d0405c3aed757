"""What a private function is asked for, as a name: a function of public facts alone."""

import dataclasses
import enum
from typing import Any

import jax

from dpjax._fingerprints import digest
from dpjax._programs import Program
from dpjax._pytree import TreeSpec
from dpjax.base import Mechanism
from dpjax.random._open_ledgers import Request


def request_of(program: Program, mechanism: Mechanism, key: jax.Array, records: Any) -> Request:
    """The request for a release of a program's value.

    Its name is made of both traced programs, which say what is drawn, of all parameters of the
    mechanism, and of the structure, shapes and dtypes of the records.

    Args:
        program: the target.
        mechanism: that releases its value.
        key: of the kind that is used; its words do not matter.
        records: the database; what it holds does not matter.
    """
    trace = jax.make_jaxpr(mechanism, return_shape=True)
    drawn, release = trace(key, program.outputs.tree())
    spec = TreeSpec.of(records)
    kinds = [(leaf.shape, str(leaf.dtype)) for leaf in spec.leaves]
    asked = (program.fingerprint, drawn, _parameters(mechanism), str(spec.structure), kinds)
    return Request(digest(*asked), TreeSpec.of(release.value))


def _parameters(value: Any) -> Any:
    """The numbers and words in a mechanism and its sensitivity; functions are in the program."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TreeSpec)):
        fields = {f.name: _parameters(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value).__module__, type(value).__qualname__, fields
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (str, int, float)) or hasattr(value, "dtype"):
        return value
    return type(value).__name__
