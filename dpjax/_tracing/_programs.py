"""Traced programs with a fingerprint. The program that was fingerprinted is the one that runs."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Texts
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, PyTree, Value
from dpjax._tracing import _host_calls
from dpjax._tracing._contents import contents_of
from dpjax._tracing._evaluate import NAMES, evaluate
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._foreign import in_own_operations
from dpjax._tracing._host_code import Cached, HostCall
from dpjax._tracing._memory import largest_array
from dpjax._tracing._walks import Atom, Equation, aval, equations, parts, primitives, reached_from

T = TypeVar("T")

_MOST_KEPT = 64  # Compiled functions, and programs of a function, one for each shape of arguments.
# Operations that run code outside of JAX, besides those with "callback" in their names.
_OUTSIDE = frozenset(("check", "custom_call", "debug_print", "ffi_call", "infeed", "outfeed"))
# Errors of JAX if Python asks for a number that only the compiled program will know.
_ASKED_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_OTHER_WAYS = {
    "target": ", or hand over code of NumPy by dpjax.targets.host",
    "oracle": ", and draw with jax.random instead of numpy.random",
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A function traced at fixed shapes. Programs with equal fingerprints are equal.

    A program can be a static argument of `jit`: if the same function is traced again, the compiled
    program is reused. A program that calls the host has an additional first input, the origin of
    its database (see `dpjax._tracing._host_calls`).

    No other code can write to the arrays of a program. So it always computes the same, also on
    other devices and inside of other programs. Users' rules for `vmap` are left out.

    Attributes:
        traced: the program as JAX traced it, with views of the caller's arrays. They show whether
            the caller has written to one.
        jaxpr: the same program with its own copies of these arrays. This one runs.
        inputs: structure, shapes and dtypes of the arguments.
        outputs: structure, shapes and dtypes of the results.
        configuration: the settings of JAX that change its results.
        settings: where code on the host runs; not a part of the fingerprint.
    """

    traced: jex.ClosedJaxpr
    jaxpr: jex.ClosedJaxpr
    inputs: TreeSpec
    outputs: TreeSpec
    configuration: tuple[object, ...]
    settings: tuple[object, ...] = ()

    @classmethod
    def trace(cls, name: str, function: Callable[..., PyTree], *arguments: PyTree) -> "Program":
        """Traces `function` on shape structs; `name` is for messages.

        Matrix products run at precision "highest". With a GPU's default, only 10 bits of a small
        difference between neighbors might be right.
        """
        function = _uncached(function)
        kept = _unchanging(name, function, arguments)
        fresh = _checked(name, function)
        settings: list[object] = []

        def with_origin(origin: jax.Array, *args: PyTree) -> PyTree:
            tracing = _host_calls.Tracing(origin, settings)
            try:
                with _host_calls.TRACING(tracing):
                    return fresh(*args)
            finally:
                tracing.origin = None  # JAX's caches keep `tracing`, which would keep the trace.

        precision = jax.default_matmul_precision("highest")
        with precision, needs_no_values(name):
            traced = _traced(fresh) if kept is None else kept.traced
            jaxpr, outputs = traced(*arguments)
            kind = jaxpr.jaxpr, configuration()
            if kept is not None and (program := kept.programs.get(kind)) is not None:
                return program
            jaxpr = in_own_operations(name, jaxpr)
            refuse_outside_code(name, jaxpr)
            if "pure_callback" in primitives(jaxpr.jaxpr):
                jaxpr, outputs = _traced(with_origin)(_host_calls.SPEC, *arguments)
                jaxpr = in_own_operations(name, jaxpr)
        specs = TreeSpec.of(arguments), TreeSpec.of(outputs)
        own = with_own_arrays(jaxpr)
        program = cls(with_views(jaxpr), own, *specs, configuration(), tuple(settings))
        if kept is not None:
            if len(kept.programs) >= _MOST_KEPT:
                kept.programs.clear()
            kept.programs[kind] = program
        return program

    def followed_by(self, function: Callable[[PyTree], PyTree]) -> "Program":
        """The program of the same arguments that applies a function to the results."""

        def whole(*arguments: PyTree) -> PyTree:
            return function(self(*arguments, origin=_host_calls.current().origin))

        return Program.trace("target", whole, *self.inputs.tree())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of operations, constants and configuration; needs concrete constants."""
        return digest(self.jaxpr, self.configuration)

    @property
    def is_unchanged(self) -> bool:
        """Whether the caller's arrays and JAX's configuration are the same as at the trace."""
        return digest(self.traced, configuration()) == self.fingerprint

    def check_unchanged(self, name: str) -> None:
        """Raises if a constant, code on the host or JAX's configuration has changed."""
        for equation in equations(self.jaxpr.jaxpr):
            if call := _host_call(equation):
                call.code.check_unchanged()
        if not self.is_unchanged:
            raise ValueError(
                f"{name} has changed since it was traced: an array that it closes over was written"
                " to, or JAX's configuration (float64, random numbers, disable_jit) is another"
            )

    def __call__(self, *arguments: PyTree, origin: ArrayLike | None = None) -> PyTree:
        """Runs the program on arguments of the traced structure and shapes.

        Databases count as private unless their origin is given.
        """
        operands = jax.tree.leaves(arguments)
        if len(self.inputs.leaves) < len(self.jaxpr.jaxpr.invars):
            operands.insert(0, _host_calls.PRIVATE if origin is None else origin)
        return jax.tree.unflatten(self.outputs.structure, evaluate(self.jaxpr, *operands))

    def __eq__(self, other: object) -> bool:
        if self is other:  # The usual case in JAX's caches.
            return True
        return isinstance(other, Program) and (
            (self.fingerprint, self.inputs, self.outputs, self.settings)
            == (other.fingerprint, other.inputs, other.outputs, other.settings)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        # JAX prints a program whenever `vmap` maps over it. Printing all operations takes .1 s.
        return f"Program({self.inputs} -> {self.outputs})"

    @property
    def is_concrete(self) -> bool:
        """Whether every constant is known. It is not if `vmap` maps over a closed-over value."""
        return not any(_checks.is_traced(constant) for constant in self.jaxpr.consts)

    @functools.cached_property
    def calls_host(self) -> bool:
        """Whether it runs code on the host, which needs the origin of a database."""
        return "pure_callback" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def library_calls(self) -> frozenset[str]:
        """The names of operations that XLA leaves to other libraries on a CPU."""
        return (NAMES | {"fft"}) & primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether the program itself spreads work over devices."""
        return "shard_map" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether the program has loops. A device starts kernels in every step of a loop."""
        return bool({"scan", "while"} & primitives(self.jaxpr.jaxpr))

    @functools.cached_property
    def uses_input(self) -> bool:
        """Whether any of the outputs depends on any of the inputs."""
        reached = reached_from(self.jaxpr.jaxpr, set(self._inputs))
        return any(x in reached for x in self.jaxpr.jaxpr.outvars if isinstance(x, jex.Var))

    @functools.cached_property
    def largest_array(self) -> int:
        """Bytes of the largest array that depends on an input: the memory that one call adds."""
        return largest_array(self.jaxpr, self._inputs, fused=False)

    @functools.cached_property
    def largest_array_on_cpu(self) -> int:
        """As `largest_array`, among the arrays that XLA writes to memory on a CPU."""
        return largest_array(self.jaxpr, self._inputs, fused=True)

    @property
    def _inputs(self) -> list[jex.Var]:
        """The variables of the arguments, without the origin."""
        invars = self.jaxpr.jaxpr.invars
        return invars[len(invars) - len(self.inputs.leaves) :]


class Unchanging:
    """A function that always computes the same, so its traces and programs can be kept.

    It must consist of dpjax's code and numbers, or have known contents (see `contents_of`).
    """

    def __init__(self, name: str, function: Callable[..., PyTree]):
        """`name` is for messages and for the history of ledgers."""
        self.__name__ = name
        self.function = function
        # By JAX's configuration. JAX's own caches of traces ignore a part of it.
        self._compiled: dict[tuple[object, ...], Any] = {}
        self.programs: dict[tuple[jex.Jaxpr, tuple[object, ...]], Program] = {}

    def traced(self, *arguments: PyTree) -> tuple[jex.ClosedJaxpr, PyTree]:
        """The function traced on shape structs, and the shapes of its results."""
        settings = configuration()
        compiled = self._compiled.get(settings)
        if compiled is None:  # `make_jaxpr` would make it at every call.
            compiled = self._compiled[settings] = jax.jit(_checked(self.__name__, self))
        found = compiled.trace(*arguments)
        if len(found.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
            # Traced values that the function closes over became inputs.
            return _traced(_checked(self.__name__, self))(*arguments)
        return found.jaxpr, found.out_info

    def __call__(self, *arguments: PyTree) -> PyTree:
        """The value of the function."""
        return self.function(*arguments)


# The kept programs of functions, by name, contents and JAX's settings.
_UNCHANGING: dict[Hashable, Unchanging] = {}
_MOST_UNCHANGING = 256


def _uncached(function: Any) -> Callable[..., PyTree]:
    """The function without `functools.cache`, since traced arrays cannot be keys of a cache."""
    while isinstance(function, Cached):
        function = function.__wrapped__
    return function


def _traced(function: Callable[..., PyTree]) -> Callable[..., tuple[jex.ClosedJaxpr, PyTree]]:
    """A function that maps shape structs to the traced function and the shapes of its results."""
    return jax.make_jaxpr(function, return_shape=True)


def is_plain(tree: Any) -> bool:
    """Whether all containers of a tree of shapes are those of Python and dpjax.

    Containers of users may compare equal wrongly, and their methods may have changed since.
    """
    if type(tree) is dict:
        return all(type(key) is str and is_plain(item) for key, item in tree.items())
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    if type(tree) in (Numbers, PaddedRecords, Texts):
        return all(map(is_plain, vars(tree).values()))
    if isinstance(tree, np.dtype):  # Of numbers.
        return True
    return tree is None or type(tree) is jax.ShapeDtypeStruct


def _unchanging(
    name: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...]
) -> Unchanging | None:
    """The kept programs of a function with these contents; None if its contents are unknown."""
    if isinstance(function, Unchanging):
        return function if is_plain(arguments) else None
    contents = contents_of(function)
    if contents is None or not is_plain(arguments):
        return None
    # JAX's own caches leave out some settings, such as how keys are made.
    key = name, contents, tuple(jax.config.values.values())
    try:
        kept = _UNCHANGING.get(key)
    except TypeError:  # A setting that has no hash.
        return None
    if kept is None:
        if len(_UNCHANGING) >= _MOST_UNCHANGING:
            _UNCHANGING.clear()
        kept = _UNCHANGING.setdefault(key, Unchanging(name, function))
    # The kept function may have been given other code since its contents were read.
    kept.function = function
    return kept


def _checked(name: str, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A new function that checks that the value has real arrays.

    JAX caches traces by the function object. For a known object, it would not notice that a
    closed-over array has changed.
    """

    def fresh(*args: PyTree) -> PyTree:
        return _checks.real_arrays(f"the value of the {name}", function(*args))

    return fresh


# Compiled programs. JAX itself keeps up to 4096 programs of some megabytes each. So the memory of a
# process that samples and releases many targets would grow. `kept_jit` keeps fewer programs.


class KeptJit(Generic[T]):
    """A compiled function, some of whose arguments by keyword are static."""

    def __init__(
        self,
        function: Callable[..., T],
        static: tuple[str, ...],
        donate: tuple[int, ...],
        most: int,
    ):
        """Arguments at the `donate` places are used up by a call."""
        self._static = static

        @functools.lru_cache(most)
        def compiled(values: tuple[object, ...]) -> Any:
            known: Any = dict(zip(static, values, strict=True))

            def run(*arguments: Any, **named: Any) -> T:
                return function(*arguments, **named, **known)

            run.__name__ = run.__qualname__ = function.__name__
            return jax.jit(run, donate_argnums=donate)

        self._compiled = compiled
        self._last: tuple[tuple[object, ...], Any] = (), None

    def _of(self, named: dict[str, Any]) -> Any:
        return self._compiled(tuple(map(named.pop, self._static)))

    def __call__(self, *arguments: Any, **named: Any) -> T:
        """The value of the function."""
        values = tuple(map(named.pop, self._static))
        known, run = self._last
        # The same objects as in the last call need not be hashed again.
        if run is None or not all(map(operator.is_, known, values)):
            run = self._compiled(values)
            self._last = values, run
        return run(*arguments, **named)

    def trace(self, *arguments: Any, **named: Any) -> jax.stages.Traced:
        """The function traced for arguments of these shapes."""
        return self._of(named).trace(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """The function as XLA gets it, for arguments of these shapes."""
        return self._of(named).lower(*arguments, **named)


def kept_jit(
    *static: str, donate: tuple[int, ...] = (), most: int = _MOST_KEPT
) -> Callable[[Callable[..., T]], KeptJit[T]]:
    """Compiles a function, and keeps the programs of the last values of its static arguments."""
    return lambda function: KeptJit(function, static, donate, most)


# Fusion emitters and the last level of LLVM make programs of noise no faster. Integers have the
# same bits under all options.
_QUICKLY = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_use_fusion_emitters": False,
}


class QuickJit:
    """A program of integers that XLA compiles in half of the time on a CPU, and runs as fast.

    Inside another program it is a part of that one.
    """

    def __init__(self, function: Callable[..., Any], *, static: tuple[str, ...] = ()):
        """Some arguments by keyword are static."""
        # JAX keeps what it traced of the inner function for both.
        self._inside = jax.jit(function, static_argnames=static)
        self._quick = jax.jit(self._inside, static_argnames=static, compiler_options=_QUICKLY)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The value of the function."""
        # Under `grad` or `vmap` alone nothing is recorded, but the function is no whole program.
        traced = _checks.any_traced(arguments, named)
        return (self._inside if traced else self._chosen())(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """The function as XLA gets it, for arguments of these shapes."""
        return self._chosen().lower(*arguments, **named)

    def _chosen(self) -> Any:
        # JAX takes options for whole programs only, and those of a CPU only there.
        is_whole = jax.default_backend() == "cpu" and not _checks.is_staging()
        return self._quick if is_whole else self._inside


@kept_jit("program")
def evaluate_alone(database: Database, *, program: Program) -> Value:
    """The value of one database alone, as releases compute it."""
    return apart(program, database)


def apart(program: Program, database: Database) -> Value:
    """The value, behind barriers, so that it is rounded as in sampling.

    Without barriers, XLA could merge operations of the target with those that make the database or
    use the value. For a constant database it would evaluate the target while compiling, operation
    by operation.
    """
    return lax.optimization_barrier(program(lax.optimization_barrier(database)))


@contextlib.contextmanager
def needs_no_values(name: str) -> Generator[None, None, None]:
    """Explains the errors of functions that ask for numbers while they are traced."""
    try:
        yield
    except (TypeError, IndexError) as error:
        if "unhashable type" in str(error) and "Tracer" in str(error):
            raise TypeError(
                f"{name} must not call a function that keeps results by its arguments, such as one"
                " of functools.lru_cache: arrays are no keys. Leave out the decorator"
            ) from error
        # If a shape is traced, JAX raises a plain TypeError with these words.
        if not isinstance(error, _ASKED_FOR_VALUES) and "concrete values" not in str(error):
            raise
        asked, *_ = str(error).splitlines()
        raise TypeError(
            f"{name} must be JAX code, which is traced without knowing any numbers, but asked for"
            f" one ({asked.rstrip('.')}): compute with jax.numpy instead of numpy, float() and"
            f" int(), choose with jnp.where instead of if{_OTHER_WAYS.get(name, '')}"
        ) from error


def _host_call(equation: Equation) -> HostCall | None:
    """The operation's call to the host, if `targets.host` made it; otherwise None."""
    if equation.primitive.name != "pure_callback":
        return None
    called = getattr(equation.params["callback"], "callback_func", None)
    return called if isinstance(called, HostCall) else None


def refuse_outside_code(name: str, traced: jex.ClosedJaxpr) -> None:
    """Refuses programs that could raise, print or remember something about a private database."""
    for equation in equations(traced.jaxpr):
        operation = equation.primitive.name
        if ("callback" in operation or operation in _OUTSIDE) and not _host_call(equation):
            raise ValueError(
                f"{name} must not call code outside of JAX by {operation}: on the private database"
                " it could raise an error or print, and so decide what is released. Call functions"
                " of NumPy by dpjax.targets.host, programs by dpjax.targets.command_line, and"
                " leave out debugging and run-time checks (throw=False of lineax, optimistix and"
                " diffrax)"
            )
    effects = [x for x in traced.effects if type(x).__name__ != "InternalMutableArrayEffect"]
    if effects:
        raise ValueError(f"{name} must be a pure function, but has side effects: {effects}")


def configuration() -> tuple[object, ...]:
    """The settings of JAX that change the results of a traced program."""
    # With `disable_jit`, every operation is compiled and rounded separately.
    of_values = ("jax_enable_x64", "jax_disable_jit")
    of_keys = ("jax_threefry_partitionable", "jax_default_prng_impl")
    return tuple(getattr(jax.config, name) for name in (*of_values, *of_keys))


# Arrays of programs.
#
# A traced program holds references to the arrays that its function closes over. If a caller wrote
# to such an array, the program would compute something else, under the old fingerprint. So a
# `Program` has copies.
#
# Without x64, JAX converts NumPy arrays of 64 bits. It caches the result by the address of the
# array, as long as a traced program holds the array. After a write, later traces would get the old
# numbers from that cache. So no traced program holds the caller's array itself, only a view.


def with_own_arrays(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with copies of all arrays in it, which nobody else can write to.

    Programs and inner programs without arrays stay the same objects, because JAX's caches look
    programs up by the object.
    """
    return _Copies(_copy).of(program)


def with_views(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with views of the NumPy arrays in it, which show later writes.

    A view shares the memory of an array. But it is another object, so JAX's cache of converted
    arrays does not know it.
    """
    return _Copies(_view).of(program)


class _Copies:
    """Makes one copy of each array, so that places that shared an array share its copy."""

    def __init__(self, copy: Callable[[Any], Any]):
        self._copy = copy
        self._made = dict[int, tuple[Any, Any]]()

    def of(self, value: Any) -> Any:
        """A program, a parameter of an operation or an array, with copies of all arrays in it."""
        if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
            return self._once(value, self._program)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(x is y for x, y in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, (np.ndarray, jax.Array)) and not _checks.is_traced(value):
            return self._once(value, self._copy)
        return value

    def _once(self, value: Any, copy: Callable[[Any], Any]) -> Any:
        if id(value) not in self._made:
            # The value is kept alive, so no other object can get its address.
            self._made[id(value)] = value, copy(value)
        return self._made[id(value)][1]

    def _program(self, program: Any) -> Any:
        jaxpr, constants = parts(program)
        equations = [self._equation(equation) for equation in jaxpr.eqns]
        outputs = [self._atom(atom) for atom in jaxpr.outvars]
        own = [self.of(constant) for constant in constants]
        old = [*jaxpr.eqns, *jaxpr.outvars, *constants]
        if all(x is y for x, y in zip([*equations, *outputs, *own], old, strict=True)):
            return program
        copied = jaxpr.replace(eqns=equations, outvars=outputs)
        return jex.ClosedJaxpr(copied, own) if isinstance(program, jex.ClosedJaxpr) else copied

    def _equation(self, equation: Equation) -> Equation:
        inputs = [self._atom(atom) for atom in equation.invars]
        parameters = {name: self.of(value) for name, value in equation.params.items()}
        same = all(x is y for x, y in zip(inputs, equation.invars, strict=True))
        if same and all(parameters[name] is x for name, x in equation.params.items()):
            return equation
        return equation.replace(invars=inputs, params=parameters)

    def _atom(self, atom: Atom) -> Atom:
        if not isinstance(atom, jex.Literal):
            return atom
        own = self.of(atom.val)
        return atom if own is atom.val else jex.Literal(own, aval(atom))


def _view(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        own = array.copy()
        own.flags.writeable = False
        return own
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # Keys are copied when they are made.
        return array
    with jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True)
