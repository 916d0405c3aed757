"""Fingerprints: hashes of traced code and of nested values, the same in every process."""

import dataclasses
import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._host_code import HostCode, fingerprint
from dpjax._tracing._walks import Atom, live, parts

# Parameters of a traced operation that do not change its outputs: names, the mesh that was set
# around it, which intermediate values derivatives may keep, and functions of Python. The functions
# are rules for derivatives, which are not run, and for `custom_vmap`, which compute the same value.
_IGNORED_PARAMETERS = frozenset(
    (
        *("name", "debug_info", "ctx_mesh", "policy", "jvp", "jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
        *("fwd_jaxpr_thunk", "bwd", "out_trees", "rule"),
    )
)


def digest(*parts: object) -> str:
    """A hash of nested values that is the same in every process: 128 bits, in hex."""
    sink = hashlib.sha256()
    _encode(sink, parts)
    return sink.hexdigest()[:32]


def _encode(sink: "hashlib._Hash", value: Any) -> None:
    """Feeds a value to the hash, with a tag for its kind and its length where it has one."""
    text: str | None = None
    if isinstance(value, float) and value != value:
        sink.update(struct.pack("<d", value))  # The text of every NaN is one.
    elif value is None or isinstance(value, (str, int, float)):
        text = repr(value)
    elif isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        # One class from jax 0.11 on. Before, only a closed one has constants.
        jaxpr, constants = parts(value)
        _encode_jaxpr(sink, jaxpr)
        _encode(sink, tuple(constants))
    elif isinstance(value, (jax.Array, np.ndarray, np.generic)):
        array: Any = value
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            _encode(sink, ("key", str(jax.random.key_impl(array))))
            array = jax.random.key_data(array)
        host = np.asarray(array)
        _encode(sink, ("array", host.dtype.name, host.shape))
        sink.update(host.tobytes())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        _encode(sink, (type(value).__qualname__, fields))
    elif isinstance(value, dict):
        _encode(sink, ("dict", sorted(value.items(), key=lambda item: str(item[0]))))
    elif type(value).__name__ == "PRNGImpl":
        implementation: Any = value
        text = implementation.name
    elif isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        # The devices change no value, and cannot be pickled.
        _encode(sink, ("mesh", tuple(value.shape.items()), tuple(map(str, value.axis_types))))
    elif isinstance(value, (set, frozenset)):
        _encode(sink, ("set", sorted(map(repr, value))))
    elif isinstance(value, (tuple, list)):
        sink.update(b"(%d" % len(value))
        for item in value:
            _encode(sink, item)
    elif isinstance(value, HostCode):
        text = value.fingerprint
    else:
        # A parameter of an operation: by its text, unless that is an address or leaves out code.
        text = repr(value)
        if " at 0x" in text or callable(value):
            text = fingerprint(value)
    if text is not None:
        data = text.encode()
        sink.update(b"'%d:" % len(data) + data)


_type_name = functools.lru_cache(maxsize=4096)(str)


def _encode_jaxpr(sink: "hashlib._Hash", jaxpr: jex.Jaxpr) -> None:
    """Operations, shapes and constants; variables are numbered in order of appearance.

    Operations that no output depends on are left out: libraries compute and cache values there.
    """
    numbers: dict[jex.Var, int] = {}

    def atom(variable: Atom) -> tuple[object, ...]:
        if isinstance(variable, jex.Literal):
            return ("literal", _type_name(variable.aval), variable.val)
        return (numbers.setdefault(variable, len(numbers)), _type_name(variable.aval))

    def atoms(variables: Sequence[Atom]) -> tuple[object, ...]:
        return tuple(map(atom, variables))

    _encode(sink, ("jaxpr", atoms(jaxpr.constvars), atoms(jaxpr.invars)))
    for equation in live(jaxpr):
        parameters = {
            name: value
            for name, value in equation.params.items()
            if name not in _IGNORED_PARAMETERS
        }
        # What `with` statements around it set, without the mesh. Precisions and dtypes are
        # parameters and types by then.
        context: Any = equation.ctx
        metadata = dict(context.xla_metadata or {})
        around = (context.threefry_partitionable, context.compute_type, metadata)
        _encode(sink, (equation.primitive.name, atoms(equation.invars), parameters, around))
        _encode(sink, atoms(equation.outvars))
    _encode(sink, atoms(jaxpr.outvars))
