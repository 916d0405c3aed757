"""Fingerprints: hashes of jaxprs and nested values that are the same in every process."""

import dataclasses
import functools
import hashlib
import itertools
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._tracing._host_code import HostCode, fingerprint
from dpjax._tracing._walks import Atom, aval, live, names, parts

# Parameters of primitives that do not affect the outputs of a traced program. Fingerprints ignore
# them. Some are names, the surrounding mesh, or policies of `jax.checkpoint`. The others are Python
# functions: derivative rules, which dpjax never runs; users' `vmap` rules, which it removes; and
# the function of a reduction, which is also present as a jaxpr.
_IGNORED_PARAMETERS = names(
    "name debug_info ctx_mesh policy jvp jvp_jaxpr_fun jvp_jaxpr_thunk fwd_jaxpr_thunk bwd",
    "out_trees rule computation",
)


# A piece of an encoding: bytes or an array. Bytes are immutable and can be cached. An array may
# change, so its numbers are read whenever a hash is computed.
_Piece = bytes | Any
# Caches the encoding of each jaxpr. JAX caches the inner jaxprs of its functions. So when a
# function is traced again, most of its inner jaxprs have been encoded before.
_KEPT: weakref.WeakKeyDictionary[jex.Jaxpr, list[_Piece]] = weakref.WeakKeyDictionary()
_BY_TEXT = frozenset((str, int, bool, type(None)))
# If a parameter of an equation has a type from one of these packages, the parameter is immutable.
# JAX uses such parameters as keys of its caches, so they must not change.
_FIXED = frozenset(("jax", "jaxlib", "numpy", "ml_dtypes"))
# Types from these packages that have occurred. A value of such a type is identified by its `repr`.
_TYPES_BY_TEXT = set[type]()


class _Sink:
    """Collects the pieces of an encoding.

    Attributes:
        pieces: the pieces, in order.
        fixed: whether nothing in the encoding can change except the numbers in its arrays.
    """

    def __init__(self):
        self.pieces = list[_Piece]()
        self.fixed = True
        self.update = self.pieces.append


def digest(*parts: object) -> str:
    """Returns a 128-bit hash of nested values as hexadecimal digits, the same in every process."""
    sink, hashed = _Sink(), hashlib.sha256()
    _encode(sink, parts)
    for piece in sink.pieces:
        # The type is compared exactly, because `np.bytes_` is a subclass of bytes but counts as an
        # array.
        for data in (piece,) if type(piece) is bytes else _of_array(piece):
            hashed.update(data)
    return hashed.hexdigest()[:32]


def _encode(sink: _Sink, value: Any) -> None:
    """Appends a value to the encoding, with a tag for its type, and its length if it has one."""
    text: str | None = None
    if type(value) in _BY_TEXT:  # The most frequent case comes first.
        text = repr(value)
    elif type(value) is tuple:
        _encode_items(sink, value)
    elif type(value) in _TYPES_BY_TEXT:
        text = _of_parameter(sink, value)
    elif isinstance(value, float) and value != value:
        # NaN is encoded by its bits, because all NaNs have the same `repr`.
        sink.update(struct.pack("<d", value))
    elif isinstance(value, (str, int, float)):
        text = repr(value)
    elif isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        # Since jax 0.11, `ClosedJaxpr` and `Jaxpr` are the same class. In older versions, only a
        # `ClosedJaxpr` has constants.
        jaxpr, constants = parts(value)
        _encode_jaxpr(sink, jaxpr)
        _encode(sink, tuple(constants))
    elif isinstance(value, (jax.Array, np.ndarray, np.generic)):
        sink.update(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        sink.fixed = False
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        _encode(sink, (type(value).__qualname__, fields))
    elif isinstance(value, dict):
        sink.update(b"(2" + _of_name("dict") + b"(%d" % len(value))
        for key in sorted(value, key=str):
            _encode_items(sink, (key, value[key]))
    elif type(value).__name__ == "PRNGImpl":
        implementation: Any = value
        text = implementation.name
    elif isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        # The devices of a mesh have no effect on results, and cannot be pickled.
        _encode(sink, ("mesh", tuple(value.shape.items()), tuple(map(str, value.axis_types))))
    elif isinstance(value, (set, frozenset)):
        _encode(sink, ("set", sorted(map(repr, value))))
    elif isinstance(value, (tuple, list)):
        _encode_items(sink, value)
    elif isinstance(value, HostCode):
        sink.fixed = False
        text = value.fingerprint
    else:
        text = _of_parameter(sink, value)
    if text is not None:
        sink.update(_of_text(text))


def _of_parameter(sink: _Sink, value: object) -> str:
    """Returns the text by which a parameter is encoded: its `repr`, or a hash.

    It is a hash if the `repr` contains an address, or if the parameter is callable.
    """
    text = repr(value)
    if " at 0x" in text or callable(value):
        sink.fixed = False
        return fingerprint(value)
    if type(value).__module__.partition(".")[0] not in _FIXED or _checks.is_traced(value):
        sink.fixed = False
    else:
        _TYPES_BY_TEXT.add(type(value))
    return text


def _encode_items(sink: _Sink, items: Sequence[object]) -> None:
    sink.update(b"(%d" % len(items))
    for item in items:
        _encode(sink, item)


@functools.lru_cache(maxsize=4096)
def _of_text(text: str) -> bytes:
    data = text.encode()
    return b"'%d:" % len(data) + data


def _of_name(name: str) -> bytes:
    return _of_text(repr(name))


_type_name = functools.lru_cache(maxsize=4096)(str)


@functools.lru_cache(maxsize=4096)
def _of_variable(number: int, kind: Any) -> bytes:
    return b"(2" + _of_text(repr(number)) + _of_name(_type_name(kind))


def _of_array(array: Any) -> Iterator[bytes]:
    if not isinstance(array.dtype, np.dtype) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        yield _encoded("key", str(jax.random.key_impl(array)))
        array = jax.random.key_data(array)
    host = np.asarray(array)
    yield _encoded("array", host.dtype.name, host.shape)
    yield host.tobytes()


@functools.lru_cache(maxsize=4096, typed=True)
def _encoded(*values: object) -> bytes:
    """Returns the encoding of strings and shapes as bytes."""
    sink = _Sink()
    _encode(sink, values)
    return b"".join(sink.pieces)


def _encode_jaxpr(sink: _Sink, jaxpr: jex.Jaxpr) -> None:
    """Encodes a jaxpr. Caches the encoding if nothing can change except numbers in arrays."""
    kept = _KEPT.get(jaxpr)
    if kept is None:
        inner = _Sink()
        _encode_operations(inner, jaxpr)
        sink.fixed &= inner.fixed
        kept = list[_Piece]()
        for kind, run in itertools.groupby(inner.pieces, type):
            pieces = list(run)
            kept += [b"".join(pieces)] if kind is bytes else pieces
        if inner.fixed:
            _KEPT[jaxpr] = kept
    sink.pieces.extend(kept)


def _encode_operations(sink: _Sink, jaxpr: jex.Jaxpr) -> None:
    """Encodes operations, shapes and literals, numbering variables in order of appearance.

    Operations on which no output depends are omitted. They may be in the first trace only: a
    library may use them to compute values that it caches for later traces.
    """
    numbers: dict[jex.Var, int] = {}

    def encode_atoms(atoms: Sequence[Atom]) -> None:
        sink.update(b"(%d" % len(atoms))
        for atom in atoms:
            if isinstance(atom, jex.Literal):
                _encode(sink, ("literal", _type_name(aval(atom)), atom.val))
            else:
                sink.update(_of_variable(numbers.setdefault(atom, len(numbers)), aval(atom)))

    sink.update(b"(3" + _of_name("jaxpr"))
    encode_atoms(jaxpr.constvars)
    encode_atoms(jaxpr.invars)
    for equation in live(jaxpr):
        sink.update(b"(4" + _of_name(equation.primitive.name))
        encode_atoms(equation.invars)
        parameters = equation.params.items()
        _encode(sink, {name: x for name, x in parameters if name not in _IGNORED_PARAMETERS})
        # Settings of surrounding `with` statements that can affect results are encoded, too.
        # Precisions and dtypes are already encoded, as parameters and types.
        context: Any = equation.ctx
        metadata = dict(context.xla_metadata or {})
        _encode(sink, (context.threefry_partitionable, context.compute_type, metadata))
        encode_atoms(equation.outvars)
    encode_atoms(jaxpr.outvars)
