"""`host`: targets that are functions of NumPy arrays, evaluated on the host."""

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Target
from dpjax._tracing import _host_calls
from dpjax._tracing._host_calls import StoppedError, aside
from dpjax._tracing._host_code import HostCall, HostCode


def host(
    function: Target,
    *,
    output: PyTree,
    failure: PyTree = None,
    jobs: int | None = None,
    version: str | None = None,
) -> Target:
    """A target that is not JAX code, such as a learner of scikit-learn or a compiled library.

    JAX passes whole chunks of databases to the host, where joblib distributes the databases over
    processes. To distribute them over a cluster, call the sampler inside of
    `joblib.parallel_config` with the backend of Dask or Ray. The target can be part of JAX code,
    under `jit` and `vmap`.

    Args:
        function: maps a database, a pytree of read-only NumPy arrays with leading axis n, to a
            pytree of arrays. It must not call JAX, which may be waiting for this call. When the
            target is traced, the function is copied together with everything that it refers to, and
            every call, in any process, starts from a fresh copy. Your own code and objects are
            copied by value; Python and installed packages are identified by name and version.
        output: shapes and dtypes of the result: arrays or `jax.ShapeDtypeStruct` in dicts, lists
            and tuples. Results are cast to these dtypes if they are of the same kind (boolean,
            integer, float). Without x64, 64-bit dtypes become 32-bit ones.
        failure: the value to release if the function fails on the private database. It is a public
            pytree like the output, chosen in advance; None for zeros.
        jobs: how many databases are evaluated at a time; -1 for the number of cores. None takes the
            number from `joblib.parallel_config`, or 1. A single database is always evaluated in the
            calling process.
        version: a string such as "name 1.2", which you change whenever the code changes. Use it for
            a function that cannot be copied, or for which copying is slow. Then the version
            identifies the function, which is called without a copy.

    Returns:
        A target, which maps a database to the output.

    Raises:
        TypeError: if `function` is not a function, or refers to something that cannot be copied (a
            lock, a generator, an open file, a pointer, your compiled code); or if jobs is not an
            integer.
        ValueError: if `failure` does not have the structure of the output, or jobs is 0 or below
            -1.
        ModuleNotFoundError: if joblib is not installed.

    Formal guarantees:
        A failure is an exception, an exit, or a result that does not match `output`. During
        sampling, a failure raises an error that names the pair. On the private database, `failure`
        is released as if the function had returned it: without a message, and with the same noise
        and guarantee. Pairs on which the function fails count among the pairs that gamma leaves
        uncovered. Every database outside of the sampler counts as private. `privatize` refuses a
        function if any part of it has changed since it was sampled.

        We assume that the function returns equal values for equal databases: it uses constant
        seeds, and its solvers converge. We assume that it does not depend on anything outside of
        the copy, such as files, the environment, settings of installed packages, or modules looked
        up by name at run time. If you pass a version, we assume that it identifies the whole
        function in every process. Running time, printed output, and a crash or hang of the process
        are not hidden: use `command_line` for a program that may crash or hang.

        An interruption of the caller, by Ctrl-C or a signal handler that exits, is not a failure.
        Nothing is released, but the budget remains spent. The function continues in its own thread,
        and its result is ignored. It never runs in the main thread, so it cannot install signal
        handlers.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which only runs the target.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from dpjax import targets
        >>> median = targets.host(np.median, output=jnp.zeros(()))
        >>> float(median(jnp.array([3.0, 1.0, 2.0])))
        2.0
    """
    _checks.function("function", function)
    if version is not None and (type(version) is not str or not version):
        raise TypeError(
            f'version must be a string such as "name 1.2", got {_checks.shown(version)}'
        )
    return host_target(lambda: HostCode(function, version), output, failure, jobs)


def host_target(
    freeze: Callable[[], HostCode],
    output: PyTree,
    failure: PyTree,
    jobs: int | None,
    **options: str | int,
) -> Target:
    """Makes a target that is evaluated on the host, with options for `joblib.parallel_config`."""
    joblib = _checks.extra("joblib", "host")
    if jobs is not None:
        options["n_jobs"] = _checks.integer("jobs", jobs, least=-1)
        if jobs == 0:
            raise ValueError("jobs must be at least 1, or -1 for all cores, got 0")
    declared = TreeSpec.of(output).tree()
    public = _public_value(failure, declared)
    # This copy raises an error early if the function cannot be copied. Tracing makes another copy.
    freeze()

    def target(database: Database) -> Value:
        # JAX may call back on a thread of its own, in which the caller's joblib configuration does
        # not apply.
        with joblib.parallel_config() as configuration:
            workers = _Workers(dict[str, object](configuration, **options))
        tracing = _host_calls.current()
        tracing.settings.append(workers)
        specs = jax.tree.map(_canonical, declared)
        fallback = [leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in public]
        with _host_calls.host_errors():
            return jax.pure_callback(
                _Evaluation(freeze(), specs, fallback, workers),
                specs,
                tracing.origin,
                jax.tree.map(jnp.asarray, database),  # pyright: ignore  # Its types are partial.
                vmap_method="broadcast_all",
            )

    return target


T = TypeVar("T")


class _Workers:
    """A configuration of joblib, which determines the workers that evaluate databases.

    Workers do not affect values, so fingerprints must not depend on this configuration. Therefore
    this class is not a dataclass, and its repr is constant.
    """

    def __init__(self, configuration: dict[str, object]):
        self._configuration = configuration

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Workers) and self._configuration == other._configuration

    def __repr__(self) -> str:
        return "workers"

    def map(self, function: Callable[..., T], tasks: Iterable[tuple[object, ...]]) -> list[T]:
        """Returns the values of a function on each tuple of arguments."""
        joblib = _checks.extra("joblib", "host")
        with joblib.parallel_config(**self._configuration):
            parallel = joblib.Parallel()
            # With one job there is no lock: only backends with processes need it, and a call that
            # was abandoned after Ctrl-C would hold it forever.
            with contextlib.nullcontext() if parallel.n_jobs == 1 else _ONE_AT_A_TIME:
                return parallel(joblib.delayed(function)(*task) for task in tasks)


# Several devices may call the host at the same time, but a backend of joblib with processes can
# handle only one call at a time.
_ONE_AT_A_TIME = threading.RLock()


class _Failure(str):
    """The reason why a function failed, in one line."""


def _failure(error: BaseException) -> _Failure:
    kind = type(error).__name__
    try:
        return _Failure(" ".join(f"{kind}: {error}".split()))
    except BaseException:  # Even the `__str__` of an exception may raise an error.
        return _Failure(kind)


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation(HostCall):
    """The function that JAX calls back, with a stack of databases as argument."""

    code: HostCode
    output: PyTree
    failure: list[np.ndarray]
    workers: _Workers

    def __call__(self, origin: jax.typing.ArrayLike, database: Database) -> list[np.ndarray]:
        """Returns the leaves of the function's outputs, stacked over databases.

        On private databases, it raises an error only if the user interrupts it.
        """
        try:
            # Only NumPy is used from here on. JAX may be waiting for this call, so using JAX could
            # deadlock.
            origin = np.asarray(origin)
            batch = origin.shape[:-1]
            origins = origin.reshape(-1, *_host_calls.SPEC.shape)

            def stacked(leaf: jax.Array) -> np.ndarray:
                return np.asarray(leaf).reshape(len(origins), *leaf.shape[len(batch) :])

            stack = jax.tree.map(stacked, database)
            databases = [jax.tree.map(operator.itemgetter(i), stack) for i in range(len(origins))]
            found = aside(functools.partial(self._values, origins, databases))
            values = [self.failure if isinstance(x, _Failure) else x for x in found]
            return [np.stack(x).reshape(batch + x[0].shape) for x in zip(*values, strict=True)]
        except StoppedError as error:
            raise _host_calls.HostError(str(error)) from None
        except Exception:
            raise
        except BaseException as error:
            _host_calls.interrupted(error)

    def _values(
        self, origins: np.ndarray, databases: list[Database], wanted: Callable[[], bool]
    ) -> list[list[np.ndarray] | _Failure]:
        attempt = functools.partial(_attempt, self.code.run, self.output)
        tasks = zip(origins, databases, strict=True)
        if len(databases) == 1:
            return [attempt(*task) for task in tasks]
        try:
            return self.workers.map(attempt, (task for task in tasks if wanted()))
        except _host_calls.HostError:
            raise
        except Exception as error:  # The workers failed, for example because a process was killed.
            failure = _failure(error)
            if all(map(_host_calls.is_private, origins)):
                return [failure] * len(origins)
            _host_calls.fail(origins, failure)


def _attempt(
    function: Target, output: PyTree, origin: np.ndarray, database: Database
) -> list[np.ndarray] | _Failure:
    """Returns the leaves of the function's value in their declared dtypes.

    If the function fails on a private database, returns a `_Failure`. If it fails on a sampled
    database, an error is raised.
    """
    # Python delivers signals to the main thread, so the function must run in another thread. In a
    # worker process, this code starts in the main thread and passes the function to another one.
    if threading.current_thread() is threading.main_thread():
        return aside(lambda _: _attempt(function, output, origin, database))
    try:
        return _leaves(output, function(database))
    except BaseException as error:  # This also covers `sys.exit` inside of the function.
        failure = _failure(error)
    if _host_calls.is_private(origin):
        return failure
    _host_calls.fail(origin[None], failure)


def _leaves(output: PyTree, value: PyTree) -> list[np.ndarray]:
    return jax.tree.leaves(jax.tree.map(_as_declared, output, value))


def _as_declared(spec: jax.ShapeDtypeStruct, value: jax.typing.ArrayLike) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != spec.shape or not _same_kind(array.dtype, spec.dtype):
        raise ValueError(
            f"the function returned {_checks.described(array)}, not {_checks.described(spec)}"
        )
    with np.errstate(all="ignore"):
        converted = array.astype(spec.dtype)
    if jnp.issubdtype(spec.dtype, jnp.integer) and np.any(converted != array):
        raise OverflowError(f"the function returned integers out of the range of {spec.dtype}")
    return converted


def _same_kind(dtype: np.dtype, declared: np.dtype) -> bool:
    # Unlike `np.floating`, `jnp.floating` includes floats that NumPy lacks, such as bfloat16.
    kinds = (np.bool_, np.integer, jnp.floating)
    found, wanted = (
        next((i for i, kind in enumerate(kinds) if jnp.issubdtype(x, kind)), len(kinds))
        for x in (dtype, declared)
    )
    return found <= wanted < len(kinds)


def _public_value(failure: PyTree, output: PyTree) -> list[np.ndarray]:
    """Returns the leaves of the value that is released if the function fails."""
    if failure is None:
        return [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(output)]
    try:
        value = _leaves(output, failure)
    except Exception:
        value = None
    if value is None or not all(np.all(np.isfinite(leaf)) for leaf in value):
        raise ValueError(
            f"failure must be finite and have the structure of the output, {output}, got"
            f" {_checks.shown(failure)}"
        )
    return value


def _canonical(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))
