"""Traced programs with a fingerprint: what is fingerprinted is what runs."""

import contextlib
import dataclasses
import functools
import hashlib
import pickle
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax._pytree import TreeSpec

# Parameters of a traced operation that do not change what it computes: names, and the rules of
# differentiation, which are functions with an address of their own in every process.
_IGNORED_PARAMETERS = frozenset(
    ("name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "jvp")
)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function traced at fixed shapes; equal fingerprints make equal programs.

    Hashable by fingerprint, so it can be a static argument of `jit`: the same function traced anew
    reuses the compiled program.
    """

    jaxpr: jex.ClosedJaxpr
    inputs: TreeSpec
    outputs: TreeSpec

    @classmethod
    def trace(cls, name: str, function: Callable[..., Any], *arguments: Any) -> "Program":
        """Traces `function` on shape structs; `name` is what messages call it.

        Matrix products run at precision "highest": a GPU's default may keep 10 bits of a
        difference that the sensitivity depends on.
        """

        # A new function object each time: JAX caches traces by function, and would hide that a
        # closed-over array has changed.
        def fresh(*args: Any) -> Any:
            return _checks.real_arrays(f"the value of the {name}", function(*args))

        with jax.default_matmul_precision("highest"):
            jaxpr, outputs = jax.make_jaxpr(fresh, return_shape=True)(*arguments)
        return cls(jaxpr, TreeSpec.of(arguments), TreeSpec.of(outputs))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the operations and constants; needs concrete constants."""
        return digest(self.jaxpr)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on arguments of the traced structure and shapes."""
        leaves = jex.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.outputs.structure, leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (
            (self.fingerprint, self.inputs, self.outputs)
            == (other.fingerprint, other.inputs, other.outputs)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def is_concrete(self) -> bool:
        """Whether every constant is known; false under `vmap` over what is closed over."""
        return not any(_checks.is_traced(constant) for constant in self.jaxpr.consts)

    def uses_input(self) -> bool:
        """Whether any of the outputs depends on any of the inputs."""
        jaxpr = self.jaxpr.jaxpr
        reached = _reached(jaxpr, set(jaxpr.invars))
        return any(variable in reached for variable in jaxpr.outvars if _is_variable(variable))

    def largest_array(self) -> int:
        """Bytes of the largest array that depends on an input: what one call adds to memory."""
        jaxpr = self.jaxpr.jaxpr
        return max(_sizes(jaxpr, set(jaxpr.invars)), default=0)


def digest(*parts: Any) -> str:
    """A hash of nested values that is the same in every process: 128 bits, in hex."""
    sink = hashlib.sha256()
    _encode(sink, parts)
    return sink.hexdigest()[:32]


def _is_variable(atom: Any) -> bool:
    return isinstance(atom, jex.Var)


def _reached(jaxpr: Any, inputs: set[Any]) -> set[Any]:
    """The variables that depend on the given ones."""
    reached = set(inputs)
    for equation in jaxpr.eqns:
        if any(_is_variable(atom) and atom in reached for atom in equation.invars):
            reached.update(equation.outvars)
    return reached


def _sizes(jaxpr: Any, inputs: set[Any]) -> list[int]:
    """Bytes of the arrays that depend on the given variables, also in inner programs."""
    reached = _reached(jaxpr, inputs)
    avals: list[Any] = [variable.aval for variable in reached]
    sizes = [aval.size * getattr(aval.dtype, "itemsize", 16) for aval in avals]
    for equation in jaxpr.eqns:
        for inner in jex.jaxprs_in_params(equation.params):
            # Operands line up with inner inputs from the back: a branch has a predicate in front.
            pairs = zip(reversed(inner.invars), reversed(equation.invars), strict=False)
            passed = {v for v, atom in pairs if _is_variable(atom) and atom in reached}
            sizes += _sizes(inner, passed)
    return sizes


def _encode(sink: Any, value: Any) -> None:
    """Feeds a value to the hash, with a tag for its kind and its length where it has one."""
    if value is None or isinstance(value, (str, int, float)):
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
    elif isinstance(value, (set, frozenset)):
        _encode(sink, ("set", sorted(map(repr, value))))
    elif isinstance(value, (tuple, list)):
        sink.update(b"(%d" % len(value))
        for item in value:
            _encode(sink, item)
    elif isinstance(value, types.FunctionType):
        _encode_function(sink, value)
    elif isinstance(value, types.MethodType):
        _encode(sink, ("method", value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        _encode(sink, ("partial", value.func, value.args, value.keywords))
    elif isinstance(value, types.CodeType):
        _encode(sink, ("code", value.co_code.hex(), value.co_names, value.co_consts))
    else:
        _encode_object(sink, value)


def _encode_text(sink: Any, text: str) -> None:
    data = text.encode()
    sink.update(b"'%d:" % len(data) + data)


def _encode_object(sink: Any, value: Any) -> None:
    """Anything else, by its text, or by its state where the text is no more than an address.

    Where there is no state to be had either, the address stays: then the fingerprint holds for one
    process only, and elsewhere the target is refused.
    """
    text = repr(value)
    if " at 0x" in text:
        with contextlib.suppress(Exception):
            text = pickle.dumps(value).hex()
    _encode_text(sink, text)


def _encode_array(sink: Any, value: Any) -> None:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        _encode(sink, ("key", str(jax.random.key_impl(value))))
        value = jax.random.key_data(value)
    host = np.asarray(value)
    _encode(sink, ("array", host.dtype.name, host.shape))
    sink.update(host.tobytes())


def _encode_function(sink: Any, function: types.FunctionType) -> None:
    """A Python function inside a program, such as a host callback: its code and its closure."""
    cells = []
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        cells.append("itself" if content is function else content)
    _encode(sink, ("function", function.__code__, cells, function.__defaults__))


@functools.lru_cache(maxsize=4096)
def _type_name(aval: Any) -> str:
    return str(aval)


def _encode_jaxpr(sink: Any, jaxpr: Any) -> None:
    """Operations, shapes and constants; variables are numbered in order of appearance."""
    numbers: dict[Any, int] = {}

    def atom(variable: Any) -> Any:
        if isinstance(variable, jex.Literal):
            return ("literal", _type_name(variable.aval), variable.val)
        return (numbers.setdefault(variable, len(numbers)), _type_name(variable.aval))

    def atoms(variables: Any) -> tuple[Any, ...]:
        return tuple(atom(variable) for variable in variables)

    _encode(sink, ("jaxpr", atoms(jaxpr.constvars), atoms(jaxpr.invars)))
    for equation in jaxpr.eqns:
        parameters = {
            name: value
            for name, value in equation.params.items()
            if name not in _IGNORED_PARAMETERS
        }
        _encode(sink, (equation.primitive.name, atoms(equation.invars), parameters))
        _encode(sink, atoms(equation.outvars))
    _encode(sink, atoms(jaxpr.outvars))
