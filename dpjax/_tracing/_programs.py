"""`Program`: a traced function with a fingerprint; caches of traced and compiled programs."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as jex
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
from dpjax._tracing._contents import contents_of, with_own_arrays, with_views
from dpjax._tracing._evaluate import NAMES, evaluate
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._host_calls import in_own_operations
from dpjax._tracing._host_code import Cached, HostCall
from dpjax._tracing._memory import largest_array
from dpjax._tracing._walks import Equation, equations, primitives, reached_from

T = TypeVar("T")

# A cache keeps at most this many compiled functions. For each function, it keeps at most this many
# programs: one program for each combination of argument shapes.
_MOST_KEPT = 64
# Primitives that run code outside of JAX. Primitives with "callback" in their names do so, too.
_OUTSIDE = frozenset(("check", "custom_call", "debug_print", "ffi_call", "infeed", "outfeed"))
# Errors that JAX raises if Python code needs the value of a tracer.
_ASKED_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_OTHER_WAYS = {
    "target": ", or hand over code of NumPy by dpjax.targets.host",
    "oracle": ", and draw with jax.random instead of numpy.random",
    "where": ", and combine conditions by & and | instead of `and`, `or` and `in`",
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A function, traced for given shapes and dtypes, with a fingerprint.

    Programs with equal fingerprints and shapes are equal.

    A program can be a static argument of `jit`: if the same function is traced again, the compiled
    code is reused. A program that calls the host has an additional first input, the origin of its
    database (`dpjax._tracing._host_calls`). The origin says that the database is private, or that
    it is sampled. For a sampled database, it contains the role in the sampler and the index of the
    pair.

    No other code can write to the arrays in a program. So a program always computes the same
    results, also on other devices and inside other programs. Users' rules for `vmap` are removed.

    Attributes:
        traced: the jaxpr with views of the caller's arrays. Comparing it with `jaxpr` shows whether
            the caller has changed an array.
        jaxpr: the jaxpr with copies of these arrays. This is the jaxpr that runs.
        inputs: structure, shapes and dtypes of the arguments.
        outputs: structure, shapes and dtypes of the results.
        configuration: the settings of JAX that affect the results.
        settings: where code on the host runs; this is not part of the fingerprint.
    """

    traced: jex.ClosedJaxpr
    jaxpr: jex.ClosedJaxpr
    inputs: TreeSpec
    outputs: TreeSpec
    configuration: tuple[object, ...]
    settings: tuple[object, ...] = ()

    @classmethod
    def trace(cls, name: str, function: Callable[..., PyTree], *arguments: PyTree) -> "Program":
        """Traces `function` on arguments of type `jax.ShapeDtypeStruct`; `name` is for messages.

        Matrix products are computed at precision "highest". At the default precision of a GPU, a
        product may have only 10 correct bits, which is not enough for small differences between
        neighbors.
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
                # JAX's caches keep `tracing` alive, but they must not keep the tracer in it alive.
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
        """Returns a program that computes `function` of the results of this program."""

        def whole(*arguments: PyTree) -> PyTree:
            return function(self(*arguments, origin=_host_calls.current().origin))

        return Program.trace("target", whole, *self.inputs.tree())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of operations, constants and configuration. Constants must not be tracers."""
        return digest(self.jaxpr, self.configuration)

    def check_unchanged(self, name: str) -> None:
        """Raises an error if a constant, code on the host or JAX's configuration has changed."""
        for equation in equations(self.jaxpr.jaxpr):
            if call := _host_call(equation):
                call.code.check_unchanged()
        if digest(self.traced, configuration()) != self.fingerprint:
            raise ValueError(
                f"{name} has changed since it was traced: either an array that it closes over, or"
                " JAX's configuration (float64, random numbers, disable_jit). Undo the change, or"
                " sample the sensitivity again"
            )

    def __call__(self, *arguments: PyTree, origin: ArrayLike | None = None) -> PyTree:
        """Runs the program on arguments with the structure and shapes for which it was traced.

        `origin` says where the database comes from. Without `origin`, the database counts as
        private.
        """
        operands = jax.tree.leaves(arguments)
        if len(self.inputs.leaves) < len(self.jaxpr.jaxpr.invars):
            operands.insert(0, _host_calls.PRIVATE if origin is None else origin)
        return jax.tree.unflatten(self.outputs.structure, evaluate(self.jaxpr, *operands))

    def __eq__(self, other: object) -> bool:
        if self is other:  # This is the usual case when JAX looks up a program in its caches.
            return True
        return isinstance(other, Program) and (
            (self.fingerprint, self.inputs, self.outputs, self.settings)
            == (other.fingerprint, other.inputs, other.outputs, other.settings)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        # JAX calls `repr` whenever `vmap` maps over a program. Printing all operations would take
        # 0.1 s.
        return f"Program({self.inputs} -> {self.outputs})"

    @property
    def is_concrete(self) -> bool:
        """Whether no constant is a tracer. Under `vmap`, closed-over values may be tracers."""
        return not any(_checks.is_traced(constant) for constant in self.jaxpr.consts)

    @functools.cached_property
    def calls_host(self) -> bool:
        """Whether the program calls Python code on the host."""
        return "pure_callback" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def library_calls(self) -> frozenset[str]:
        """The names of primitives for which XLA calls external libraries on a CPU."""
        return (NAMES | {"fft"}) & primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether the program itself distributes work over devices, by `jax.shard_map`."""
        return "shard_map" in primitives(self.jaxpr.jaxpr)

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether the program has loops. On a GPU, every step of a loop launches kernels."""
        return bool({"scan", "while"} & primitives(self.jaxpr.jaxpr))

    @functools.cached_property
    def uses_input(self) -> bool:
        """Whether any of the outputs depends on any of the inputs."""
        reached = reached_from(self.jaxpr.jaxpr, set(self._inputs))
        return any(x in reached for x in self.jaxpr.jaxpr.outvars if isinstance(x, jex.Var))

    @functools.cached_property
    def largest_array(self) -> int:
        """The size in bytes of the largest array that depends on an argument."""
        return largest_array(self.jaxpr, self._inputs, fused=False)

    @functools.cached_property
    def largest_array_on_cpu(self) -> int:
        """Like `largest_array`, but counts only arrays that XLA writes to memory on a CPU."""
        return largest_array(self.jaxpr, self._inputs, fused=True)

    @property
    def _inputs(self) -> list[jex.Var]:
        """The input variables of the arguments, without the one for the database's origin."""
        invars = self.jaxpr.jaxpr.invars
        return invars[len(invars) - len(self.inputs.leaves) :]


def check_concrete(name: str, do: str, *programs: Program) -> None:
    """Refuses programs that close over a traced value.

    `do` is the remedy in the message: what the caller should do outside of `jit`.
    """
    if not all(program.is_concrete for program in programs):
        raise TypeError(f"{name} closes over a traced value: {do} outside of jit and vmap")


class Unchanging:
    """A function that always computes the same results, so its programs can be cached.

    It must consist of dpjax's own code and of numbers, or have known contents (see `contents_of`).
    """

    def __init__(self, name: str, function: Callable[..., PyTree]):
        """Wraps `function`; `name` is for messages and for the history of ledgers."""
        self.__name__ = name
        self.function = function
        # JAX's configuration is part of the keys, because JAX's own caches ignore some settings of
        # the configuration.
        self._compiled: dict[tuple[object, ...], Any] = {}
        self.programs: dict[tuple[jex.Jaxpr, tuple[object, ...]], Program] = {}

    def traced(self, *arguments: PyTree) -> tuple[jex.ClosedJaxpr, PyTree]:
        """Traces the function on shapes, and returns the jaxpr and the shapes of the results."""
        settings = configuration()
        compiled = self._compiled.get(settings)
        if compiled is None:  # `jax.make_jaxpr` would not cache traces between calls.
            compiled = self._compiled[settings] = jax.jit(_checked(self.__name__, self))
        found = compiled.trace(*arguments)
        if len(found.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
            # The function closes over tracers, which `trace` has turned into additional inputs. So
            # the function is traced by `jax.make_jaxpr` instead.
            return _traced(_checked(self.__name__, self))(*arguments)
        return found.jaxpr, found.out_info

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Calls the function."""
        return self.function(*arguments)


# Caches functions with their programs, by name, contents and JAX's settings.
_UNCHANGING: dict[Hashable, Unchanging] = {}
_MOST_UNCHANGING = 256


def _uncached(function: Any) -> Callable[..., PyTree]:
    """Unwraps `functools.cache`, because tracers cannot be the keys of a cache."""
    while isinstance(function, Cached):
        function = function.__wrapped__
    return function


def _traced(function: Callable[..., PyTree]) -> Callable[..., tuple[jex.ClosedJaxpr, PyTree]]:
    """Returns a function that maps shapes to the jaxpr of `function` and the results' shapes."""
    return jax.make_jaxpr(function, return_shape=True)


def is_plain(tree: Any) -> bool:
    """Whether a pytree of shapes consists only of containers that Python or dpjax defines.

    Containers of a user's class may compare as equal although they differ, and their methods may
    change.
    """
    if type(tree) is dict:
        return all(type(key) is str and is_plain(item) for key, item in tree.items())
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    if type(tree) in (Numbers, PaddedRecords, Texts):
        return all(map(is_plain, vars(tree).values()))
    if isinstance(tree, np.dtype):  # `Numbers` has a field that is a dtype.
        return True
    return tree is None or type(tree) is jax.ShapeDtypeStruct


def _unchanging(
    name: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...]
) -> Unchanging | None:
    """Returns the `Unchanging` that caches a function's programs.

    The result is None if the contents of the function are unknown.
    """
    if isinstance(function, Unchanging):
        return function if is_plain(arguments) else None
    contents = contents_of(function)
    if contents is None or not is_plain(arguments):
        return None
    # All settings of JAX are part of the cache key. JAX's own caches ignore some settings, for
    # example how random keys are made.
    key = name, contents, tuple(jax.config.values.values())
    try:
        kept = _UNCHANGING.get(key)
    except TypeError:  # A value in the key is not hashable.
        return None
    if kept is None:
        if len(_UNCHANGING) >= _MOST_UNCHANGING:
            _UNCHANGING.clear()
        kept = _UNCHANGING.setdefault(key, Unchanging(name, function))
    # The cached function may have been modified since it was cached. The contents of `function`
    # were read just now, so `function` matches the key.
    kept.function = function
    return kept


def _checked(name: str, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wraps a function in a new function, which checks that its value consists of real arrays.

    JAX caches traces under the function object. If the same function object were traced again, JAX
    would not notice that a closed-over array has changed.
    """

    def fresh(*args: PyTree) -> PyTree:
        return _checks.real_arrays(f"the value of the {name}", function(*args))

    return fresh


# Compiled programs. `jax.jit` caches up to 4096 programs of some megabytes each. So the memory of a
# process that samples and releases many targets would grow. `kept_jit` caches fewer programs.


class KeptJit(Generic[T]):
    """A compiled function, some of whose keyword arguments are static."""

    def __init__(
        self,
        function: Callable[..., T],
        static: tuple[str, ...],
        donate: tuple[int, ...],
        most: int,
    ):
        """Wraps `function`.

        `static` names the static keyword arguments. `donate` has the positions of arguments whose
        buffers may be reused. `most` is the largest number of cached programs.
        """
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
        """Calls the compiled function."""
        values = tuple(map(named.pop, self._static))
        known, run = self._last
        # If the static arguments are the same objects as in the previous call, they need not be
        # hashed.
        if run is None or not all(map(operator.is_, known, values)):
            run = self._compiled(values)
            self._last = values, run
        return run(*arguments, **named)

    def trace(self, *arguments: Any, **named: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit(...).trace` does."""
        return self._of(named).trace(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit(...).lower` does."""
        return self._of(named).lower(*arguments, **named)


def kept_jit(
    *static: str, donate: tuple[int, ...] = (), most: int = _MOST_KEPT
) -> Callable[[Callable[..., T]], KeptJit[T]]:
    """Like `jax.jit`, but caches at most `most` functions, one for each set of static values."""
    return lambda function: KeptJit(function, static, donate, most)


def quick_options(version: tuple[int, ...]) -> dict[str, bool | int]:
    """Returns XLA options for CPUs that halve the compile time of integer programs.

    Programs that draw noise are as fast without fusion emitters and without LLVM's highest
    optimization level. Integer arithmetic has the same results under all options.
    """
    # jaxlib raises an error for options that it does not have. Since version 0.11.1, it has no
    # option to turn off fusion emitters.
    emitters = {"xla_cpu_use_fusion_emitters": False} if version < (0, 11, 1) else {}
    return {"xla_backend_optimization_level": 1, **emitters}


class QuickJit:
    """Like `jax.jit`, with options that halve the compile time of integer programs on a CPU.

    The options have no effect inside another traced function.
    """

    def __init__(self, function: Callable[..., Any], *, static: tuple[str, ...] = ()):
        """Wraps `function`; `static` names the static keyword arguments."""
        # `_quick` wraps `_inside`, so that JAX traces `function` only once for both.
        self._inside = jax.jit(function, static_argnames=static)
        self._quick = jax.jit(
            self._inside,
            static_argnames=static,
            compiler_options=quick_options(jaxlib.version.__version_info__),
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the compiled function."""
        # Under `grad` or `vmap` without `jit`, `is_staging` is false, but the function is still not
        # the whole program. So traced arguments are detected here.
        traced = _checks.any_traced(arguments, named)
        return (self._inside if traced else self._chosen())(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit(...).lower` does."""
        return self._chosen().lower(*arguments, **named)

    def _chosen(self) -> Any:
        # JAX accepts compiler options only for whole programs, and only CPUs have these options.
        is_whole = jax.default_backend() == "cpu" and not _checks.is_staging()
        return self._quick if is_whole else self._inside


@kept_jit("program")
def evaluate_alone(database: Database, *, program: Program) -> Value:
    """Evaluates a program on one database, in a separate compiled program, as a release does."""
    return apart(program, database)


def apart(program: Program, database: Database) -> Value:
    """Runs a program between optimization barriers, so that it rounds as it does in sampling.

    Without barriers, XLA could fuse operations of the target with operations that create the
    database or use the value. If the database is a constant, XLA would evaluate the target at
    compile time, one operation at a time.
    """
    return lax.optimization_barrier(program(lax.optimization_barrier(database)))


@contextlib.contextmanager
def needs_no_values(name: str) -> Generator[None, None, None]:
    """A context that explains errors of functions that need the values of tracers."""
    try:
        yield
    except (TypeError, IndexError) as error:
        if "unhashable type" in str(error) and "Tracer" in str(error):
            raise TypeError(
                f"{name} must not call a function that caches results by its arguments, such as one"
                " decorated with functools.lru_cache, because arrays are not hashable. Remove the"
                " decorator"
            ) from error
        # If a shape is traced, JAX raises a plain TypeError whose message contains "concrete
        # values".
        if not isinstance(error, _ASKED_FOR_VALUES) and "concrete values" not in str(error):
            raise
        asked, *_ = str(error).splitlines()
        raise TypeError(
            f"{name} must be JAX code, which is traced without values of arrays, but it asked "
            f"for such a value ({asked.rstrip('.')}): compute with jax.numpy instead of numpy, "
            f"float() and int(), and use jnp.where instead of if{_OTHER_WAYS.get(name, '')}"
        ) from error


def _host_call(equation: Equation) -> HostCall | None:
    """Returns the host call of an operation that `targets.host` made; otherwise None."""
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
                " Remove debugging calls and run-time checks. In lineax, optimistix and diffrax,"
                " pass throw=False"
            )
    effects = [x for x in traced.effects if type(x).__name__ != "InternalMutableArrayEffect"]
    if effects:
        raise ValueError(f"{name} must be a pure function, but has side effects: {effects}")


def configuration() -> tuple[object, ...]:
    """Returns the settings of JAX that affect the results of a traced program."""
    # `jax_disable_jit` affects results, because it makes JAX compile and round each operation
    # separately.
    of_values = ("jax_enable_x64", "jax_disable_jit")
    of_keys = ("jax_threefry_partitionable", "jax_default_prng_impl")
    return tuple(getattr(jax.config, name) for name in (*of_values, *of_keys))
