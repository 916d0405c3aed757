"""`Program`: a traced function with a fingerprint, and caches of traced and compiled programs."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jaxlib.version
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

# The largest number of compiled functions, and of programs of one function (one program for each
# shape of its arguments).
_MOST_KEPT = 64
# Primitives that run code outside of JAX, in addition to all primitives with "callback" in their
# names.
_OUTSIDE = frozenset(("check", "custom_call", "debug_print", "ffi_call", "infeed", "outfeed"))
# Errors that JAX raises if Python code asks for the value of a tracer.
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
    """A function traced for given shapes and dtypes. Programs with equal fingerprints are equal.

    A program can be a static argument of `jit`: if the same function is traced again, the compiled
    program is reused. A program that calls the host has an additional first input, the origin of
    its database (see `dpjax._tracing._host_calls`).

    No other code can write to the arrays of a program. So a program always computes the same
    function, also on other devices and inside of other programs. Users' rules for `vmap` are
    removed.

    Attributes:
        traced: the jaxpr with views of the caller's arrays, which show whether the caller has
            changed an array.
        jaxpr: the jaxpr with copies of these arrays. This is the jaxpr that runs.
        inputs: structure, shapes and dtypes of the arguments.
        outputs: structure, shapes and dtypes of the results.
        configuration: the settings of JAX that affect the results.
        settings: where code on the host runs; not part of the fingerprint.
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

        Matrix products run at precision "highest". With a GPU's default precision, a product may
        have only 10 correct bits, which is too few for small differences between neighbors.
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
                # JAX's caches keep `tracing` alive, but they must not keep this tracer alive.
                tracing.origin = None

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
        """The program composed with a function of its results."""

        def whole(*arguments: PyTree) -> PyTree:
            return function(self(*arguments, origin=_host_calls.current().origin))

        return Program.trace("target", whole, *self.inputs.tree())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of operations, constants and configuration. Constants must be concrete."""
        return digest(self.jaxpr, self.configuration)

    @property
    def is_unchanged(self) -> bool:
        """Whether the caller's arrays and JAX's configuration are the same as at the trace."""
        return digest(self.traced, configuration()) == self.fingerprint

    def check_unchanged(self, name: str) -> None:
        """Raises an error if a constant, code on the host or JAX's configuration has changed."""
        for equation in equations(self.jaxpr.jaxpr):
            if call := _host_call(equation):
                call.code.check_unchanged()
        if not self.is_unchanged:
            raise ValueError(
                f"{name} has changed since it was traced: either an array that it closes over, or"
                " JAX's configuration (float64, random numbers, disable_jit). Undo the change, or"
                " sample the sensitivity again"
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
        if self is other:  # This is the usual case when JAX looks up its caches.
            return True
        return isinstance(other, Program) and (
            (self.fingerprint, self.inputs, self.outputs, self.settings)
            == (other.fingerprint, other.inputs, other.outputs, other.settings)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        # JAX calls `repr` whenever `vmap` maps over a program. Printing all operations would take
        # .1 s.
        return f"Program({self.inputs} -> {self.outputs})"

    @property
    def is_concrete(self) -> bool:
        """Whether no constant is a tracer, as it is if `vmap` maps over a closed-over value."""
        return not any(_checks.is_traced(constant) for constant in self.jaxpr.consts)

    @functools.cached_property
    def calls_host(self) -> bool:
        """Whether the program calls Python code on the host."""
        return "pure_callback" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def library_calls(self) -> frozenset[str]:
        """The names of primitives for which XLA calls other libraries on a CPU."""
        return (NAMES | {"fft"}) & primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether the program itself distributes work over devices, by `jax.shard_map`."""
        return "shard_map" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether the program has loops. A GPU launches kernels in every step of a loop."""
        return bool({"scan", "while"} & primitives(self.jaxpr.jaxpr))

    @functools.cached_property
    def uses_input(self) -> bool:
        """Whether any of the outputs depends on any of the inputs."""
        reached = reached_from(self.jaxpr.jaxpr, set(self._inputs))
        return any(x in reached for x in self.jaxpr.jaxpr.outvars if isinstance(x, jex.Var))

    @functools.cached_property
    def largest_array(self) -> int:
        """The bytes of the largest array that depends on an argument."""
        return largest_array(self.jaxpr, self._inputs, fused=False)

    @functools.cached_property
    def largest_array_on_cpu(self) -> int:
        """Like `largest_array`, without arrays that XLA does not write to memory on a CPU."""
        return largest_array(self.jaxpr, self._inputs, fused=True)

    @property
    def _inputs(self) -> list[jex.Var]:
        """The variables of the arguments, without the origin."""
        invars = self.jaxpr.jaxpr.invars
        return invars[len(invars) - len(self.inputs.leaves) :]


class Unchanging:
    """A function that always computes the same, so its traces and programs can be cached.

    It must consist of dpjax's code and numbers, or have known contents (see `contents_of`).
    """

    def __init__(self, name: str, function: Callable[..., PyTree]):
        """`name` is for messages and for the history of ledgers."""
        self.__name__ = name
        self.function = function
        # JAX's configuration is part of the keys, because JAX's own caches ignore some settings.
        self._compiled: dict[tuple[object, ...], Any] = {}
        self.programs: dict[tuple[jex.Jaxpr, tuple[object, ...]], Program] = {}

    def traced(self, *arguments: PyTree) -> tuple[jex.ClosedJaxpr, PyTree]:
        """The function traced on shape structs, and the shapes of its results."""
        settings = configuration()
        compiled = self._compiled.get(settings)
        if compiled is None:  # `jax.make_jaxpr` would not cache traces between calls.
            compiled = self._compiled[settings] = jax.jit(_checked(self.__name__, self))
        found = compiled.trace(*arguments)
        if len(found.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
            # The function closes over tracers, and `trace` has made them additional inputs.
            return _traced(_checked(self.__name__, self))(*arguments)
        return found.jaxpr, found.out_info

    def __call__(self, *arguments: PyTree) -> PyTree:
        """The value of the function."""
        return self.function(*arguments)


# A cache of functions with their programs, by name, contents and JAX's settings.
_UNCHANGING: dict[Hashable, Unchanging] = {}
_MOST_UNCHANGING = 256


def _uncached(function: Any) -> Callable[..., PyTree]:
    """Unwraps `functools.cache`, because tracers cannot be keys of a cache."""
    while isinstance(function, Cached):
        function = function.__wrapped__
    return function


def _traced(function: Callable[..., PyTree]) -> Callable[..., tuple[jex.ClosedJaxpr, PyTree]]:
    """A function that maps shape structs to the traced function and the shapes of its results."""
    return jax.make_jaxpr(function, return_shape=True)


def is_plain(tree: Any) -> bool:
    """Whether a pytree of shapes contains only containers of Python and dpjax.

    Containers of users may compare equal although they differ, and their methods may change.
    """
    if type(tree) is dict:
        return all(type(key) is str and is_plain(item) for key, item in tree.items())
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    if type(tree) in (Numbers, PaddedRecords, Texts):
        return all(map(is_plain, vars(tree).values()))
    if isinstance(tree, np.dtype):  # `Numbers` has a field with a dtype.
        return True
    return tree is None or type(tree) is jax.ShapeDtypeStruct


def _unchanging(
    name: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...]
) -> Unchanging | None:
    """The cached programs of a function; None if its contents are unknown."""
    if isinstance(function, Unchanging):
        return function if is_plain(arguments) else None
    contents = contents_of(function)
    if contents is None or not is_plain(arguments):
        return None
    # All settings of JAX are in the key. JAX's own caches ignore some, such as how keys are made.
    key = name, contents, tuple(jax.config.values.values())
    try:
        kept = _UNCHANGING.get(key)
    except TypeError:  # A value in the key is not hashable.
        return None
    if kept is None:
        if len(_UNCHANGING) >= _MOST_UNCHANGING:
            _UNCHANGING.clear()
        kept = _UNCHANGING.setdefault(key, Unchanging(name, function))
    # Someone may have assigned other code to the cached function object. The new function has the
    # contents that were just read.
    kept.function = function
    return kept


def _checked(name: str, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wraps a function in a new function, which checks that the value has real arrays.

    JAX caches traces by the function object. So if the same function object were traced again, JAX
    would not notice that a closed-over array has changed.
    """

    def fresh(*args: PyTree) -> PyTree:
        return _checks.real_arrays(f"the value of the {name}", function(*args))

    return fresh


# Compiled programs. `jax.jit` caches up to 4096 programs of some megabytes each. So the memory of a
# process that samples and releases many targets would grow. `kept_jit` caches fewer programs.


class KeptJit(Generic[T]):
    """A compiled function, some of whose arguments by keyword are static."""

    def __init__(
        self,
        function: Callable[..., T],
        static: tuple[str, ...],
        donate: tuple[int, ...],
        most: int,
    ):
        """Compiles a function; `donate` has the positions of arguments whose buffers are reused."""
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
        # If the static arguments are the same objects as in the last call, hashing is skipped.
        if run is None or not all(map(operator.is_, known, values)):
            run = self._compiled(values)
            self._last = values, run
        return run(*arguments, **named)

    def trace(self, *arguments: Any, **named: Any) -> jax.stages.Traced:
        """Traces the function for arguments of these shapes, as `jax.jit(...).trace` does."""
        return self._of(named).trace(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments of these shapes, as `jax.jit(...).lower` does."""
        return self._of(named).lower(*arguments, **named)


def kept_jit(
    *static: str, donate: tuple[int, ...] = (), most: int = _MOST_KEPT
) -> Callable[[Callable[..., T]], KeptJit[T]]:
    """Like `jax.jit`, with a cache of only `most` programs, one per value of static arguments."""
    return lambda function: KeptJit(function, static, donate, most)


def quick_options(version: tuple[int, ...]) -> dict[str, bool | int]:
    """Options of XLA for CPUs that halve the compile time of integer programs.

    Programs that draw noise run as fast without fusion emitters and without LLVM's highest
    optimization level. Integer arithmetic has the same results under all options.
    """
    # jaxlib raises an error for unknown options. Since version 0.11.1, there is no option to turn
    # off fusion emitters.
    emitters = {"xla_cpu_use_fusion_emitters": False} if version < (0, 11, 1) else {}
    return {"xla_backend_optimization_level": 1, **emitters}


class QuickJit:
    """Like `jax.jit`, with options that halve the compile time of integer programs on a CPU.

    Inside of another traced function, the options have no effect.
    """

    def __init__(self, function: Callable[..., Any], *, static: tuple[str, ...] = ()):
        """Compiles a function; `static` names keyword arguments that are static."""
        # `_quick` wraps `_inside`, so that JAX traces the function once for both.
        self._inside = jax.jit(function, static_argnames=static)
        self._quick = jax.jit(
            self._inside,
            static_argnames=static,
            compiler_options=quick_options(jaxlib.version.__version_info__),
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The value of the function."""
        # Under `grad` or `vmap` without `jit`, `is_staging` is false. But then the function is not
        # a whole program, either, so traced arguments are recognized here.
        traced = _checks.any_traced(arguments, named)
        return (self._inside if traced else self._chosen())(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments of these shapes, as `jax.jit(...).lower` does."""
        return self._chosen().lower(*arguments, **named)

    def _chosen(self) -> Any:
        # JAX accepts compiler options only for whole programs, and these options exist only on a
        # CPU.
        is_whole = jax.default_backend() == "cpu" and not _checks.is_staging()
        return self._quick if is_whole else self._inside


@kept_jit("program")
def evaluate_alone(database: Database, *, program: Program) -> Value:
    """The value of one database, evaluated alone, as a release evaluates it."""
    return apart(program, database)


def apart(program: Program, database: Database) -> Value:
    """Runs a program between optimization barriers, so that it is rounded as in sampling.

    Without barriers, XLA could fuse operations of the target with operations that make the database
    or use the value. For a constant database, XLA would evaluate the target at compile time, one
    operation at a time.
    """
    return lax.optimization_barrier(program(lax.optimization_barrier(database)))


@contextlib.contextmanager
def needs_no_values(name: str) -> Generator[None, None, None]:
    """Explains errors of functions that need the values of tracers."""
    try:
        yield
    except (TypeError, IndexError) as error:
        if "unhashable type" in str(error) and "Tracer" in str(error):
            raise TypeError(
                f"{name} must not call a function that caches results by its arguments, such as one"
                " decorated with functools.lru_cache, because arrays are not hashable. Remove the"
                " decorator"
            ) from error
        # If a shape is traced, JAX raises a plain TypeError with these words.
        if not isinstance(error, _ASKED_FOR_VALUES) and "concrete values" not in str(error):
            raise
        asked, *_ = str(error).splitlines()
        raise TypeError(
            f"{name} must be JAX code, which is traced without values of arrays, but it asked "
            f"for such a value ({asked.rstrip('.')}): compute with jax.numpy instead of numpy, "
            f"float() and int(), and use jnp.where instead of if{_OTHER_WAYS.get(name, '')}"
        ) from error


def _host_call(equation: Equation) -> HostCall | None:
    """The host call of an operation if `targets.host` made it, otherwise None."""
    if equation.primitive.name != "pure_callback":
        return None
    called = getattr(equation.params["callback"], "callback_func", None)
    return called if isinstance(called, HostCall) else None


def refuse_outside_code(name: str, traced: jex.ClosedJaxpr) -> None:
    """Refuses programs that could raise errors, print, or store data of a private database."""
    for equation in equations(traced.jaxpr):
        operation = equation.primitive.name
        if ("callback" in operation or operation in _OUTSIDE) and not _host_call(equation):
            raise ValueError(
                f"{name} must not call code outside of JAX by {operation}: on the private database"
                " it could raise an error or print, which reveals private data. Call NumPy"
                " functions by dpjax.targets.host, and programs by dpjax.targets.command_line."
                " Remove debugging and run-time checks (throw=False of lineax, optimistix and"
                " diffrax)"
            )
    effects = [x for x in traced.effects if type(x).__name__ != "InternalMutableArrayEffect"]
    if effects:
        raise ValueError(f"{name} must be a pure function, but has side effects: {effects}")


def configuration() -> tuple[object, ...]:
    """The settings of JAX that affect the results of a traced program."""
    # With `disable_jit`, every operation is compiled and rounded separately.
    of_values = ("jax_enable_x64", "jax_disable_jit")
    of_keys = ("jax_threefry_partitionable", "jax_default_prng_impl")
    return tuple(getattr(jax.config, name) for name in (*of_values, *of_keys))


# Arrays of programs.
#
# A jaxpr contains references to the arrays that its function closes over. If a caller changed such
# an array, the program would compute something else, but its fingerprint would stay the same. So a
# `Program` has copies of these arrays.
#
# Without x64, JAX converts NumPy arrays of 64 bits. It caches the result by the `id` of the array,
# as long as a jaxpr refers to the array. So if the caller changed the array, later traces would get
# the old numbers from this cache. To prevent this, no `Program` refers to the caller's array
# itself, but to a view.


def with_own_arrays(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same jaxpr with copies of all arrays in it, which no other code can change.

    Jaxprs and inner jaxprs without arrays remain the same objects, because JAX's caches use the
    objects as keys.
    """
    return _Copies(_copy).of(program)


def with_views(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same jaxpr with views of the NumPy arrays in it, which show later changes.

    A view shares the memory of an array. But a view is another object, so JAX's cache of converted
    arrays has no entry for it.
    """
    return _Copies(_view).of(program)


class _Copies:
    """Copies the arrays in a jaxpr. An array that occurs several times is copied once."""

    def __init__(self, copy: Callable[[Any], Any]):
        self._copy = copy
        self._made = dict[int, tuple[Any, Any]]()

    def of(self, value: Any) -> Any:
        """A jaxpr, a parameter of an operation or an array, with copies of all arrays in it."""
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
            # A reference keeps the value alive, so that no other object can get the same `id`.
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
    # Key arrays need no copy, because they cannot be changed in place.
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    with jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True)
