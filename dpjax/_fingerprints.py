"""Fingerprints: hashes of traced code and of nested values, the same in every process."""

import dataclasses
import functools
import hashlib
import struct
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._host_code import HostCode, fingerprint
from dpjax._walks import live

# Parameters of a traced operation that do not change what it computes: names, the mesh that was set
# around it, what may be kept for differentiation, and functions of Python that are not run: the
# rules of differentiation, and that of `custom_vmap`, which is another way to the same value.
_IGNORED_PARAMETERS = frozenset(
    (
        *("name", "debug_info", "ctx_mesh", "policy", "jvp", "jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
        *("fwd_jaxpr_thunk", "bwd", "out_trees", "rule"),
    )
)


def digest(*parts: Any) -> str:
    """A hash of nested values that is the same in every process: 128 bits, in hex."""
    sink = hashlib.sha256()
    _encode(sink, parts)
    return sink.hexdigest()[:32]


def _encode(sink: Any, value: Any) -> None:
    """Feeds a value to the hash, with a tag for its kind and its length where it has one."""
    if isinstance(value, float) and value != value:
        sink.update(struct.pack("<d", value))  # The text of every NaN is one.
    elif value is None or isinstance(value, (str, int, float)):
        _encode_text(sink, repr(value))
    elif isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        # One class from jax 0.11 on; before, only a closed one has constants.
        _encode_jaxpr(sink, getattr(value, "jaxpr", value))
        _encode(sink, tuple(getattr(value, "consts", ())))
    elif isinstance(value, (jax.Array, np.ndarray, np.generic)):
        _encode_array(sink, value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        _encode(sink, (type(value).__qualname__, fields))
    elif isinstance(value, dict):
        _encode(sink, ("dict", sorted(value.items(), key=lambda item: str(item[0]))))
    elif type(value).__name__ == "PRNGImpl":
        implementation: Any = value
        _encode_text(sink, implementation.name)
    elif isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        # Which devices they are changes no value, and none can be pickled.
        _encode(sink, ("mesh", tuple(value.shape.items()), tuple(map(str, value.axis_types))))
    elif isinstance(value, (set, frozenset)):
        _encode(sink, ("set", sorted(map(repr, value))))
    elif isinstance(value, (tuple, list)):
        sink.update(b"(%d" % len(value))
        for item in value:
            _encode(sink, item)
    elif isinstance(value, HostCode):
        _encode_text(sink, value.fingerprint)
    else:
        _encode_object(sink, value)


def _encode_text(sink: Any, text: str) -> None:
    data = text.encode()
    sink.update(b"'%d:" % len(data) + data)


def _encode_object(sink: Any, value: Any) -> None:
    """A parameter of an operation, by its text; what lies behind an address, by its state."""
    text = repr(value)
    by_state = " at 0x" in text or callable(value)
    _encode_text(sink, fingerprint(value) if by_state else text)


def _encode_array(sink: Any, value: Any) -> None:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        _encode(sink, ("key", str(jax.random.key_impl(value))))
        value = jax.random.key_data(value)
    host = np.asarray(value)
    _encode(sink, ("array", host.dtype.name, host.shape))
    sink.update(host.tobytes())


@functools.lru_cache(maxsize=4096)
def _type_name(aval: Any) -> str:
    return str(aval)


def _context(context: Any) -> tuple[Any, ...]:
    """What an operation is told by `with` statements around it, but for the mesh.

    Precisions and dtypes are parameters and types by then.
    """
    metadata = context.xla_metadata or {}
    return context.threefry_partitionable, context.compute_type, dict(metadata)


def _encode_jaxpr(sink: Any, jaxpr: Any) -> None:
    """Operations, shapes and constants; variables are numbered in order of appearance.

    Without what nothing depends on: libraries leave there what they compute once and keep.
    """
    numbers: dict[Any, int] = {}

    def atom(variable: Any) -> Any:
        if isinstance(variable, jex.Literal):
            return ("literal", _type_name(variable.aval), variable.val)
        return (numbers.setdefault(variable, len(numbers)), _type_name(variable.aval))

    def atoms(variables: Any) -> tuple[Any, ...]:
        return tuple(atom(variable) for variable in variables)

    _encode(sink, ("jaxpr", atoms(jaxpr.constvars), atoms(jaxpr.invars)))
    for equation in live(jaxpr):
        parameters = {
            name: value
            for name, value in equation.params.items()
            if name not in _IGNORED_PARAMETERS
        }
        context = _context(equation.ctx)
        _encode(sink, (equation.primitive.name, atoms(equation.invars), parameters, context))
        _encode(sink, atoms(equation.outvars))
    _encode(sink, atoms(jaxpr.outvars))
