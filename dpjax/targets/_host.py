"""Targets that are no JAX code: functions of NumPy arrays, evaluated on the host."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks, _origins
from dpjax._host_code import HostCall, HostCode
from dpjax._interruptions import StoppedError, aside


def host(
    function: Callable[[Any], Any],
    *,
    output: Any,
    failure: Any = None,
    jobs: int | None = None,
    version: str | None = None,
) -> Callable[[Any], Any]:
    """A target that is no JAX code, such as a learner of scikit-learn or a compiled library.

    JAX hands whole chunks of databases to the host, where joblib spreads them over processes; or
    over a cluster, where the sampler is called inside `joblib.parallel_config` with the backend of
    Dask or Ray. The target can be part of JAX code, under `jit` and `vmap`.

    Args:
        function: takes a database, a pytree of read-only NumPy arrays with leading axis n, to a
            pytree of arrays. It must not call JAX, which may wait for the very call that it is in.
            It is frozen with all that it reaches when the target is traced, and every call, in any
            process, starts from a fresh copy: closures, globals, modules, classes and objects of
            yours by value, Python and installed packages by name and version.
        output: what the function returns: arrays or `jax.ShapeDtypeStruct` in dicts, lists and
            tuples. Numbers are converted within their kind; 64 bits count as 32 where float64 is
            not enabled.
        failure: what is released where the function fails on the private database: public, fixed in
            advance, a pytree like the output; None for zeros.
        jobs: databases at a time, -1 for as many as there are cores; None for what
            `joblib.parallel_config` says, else 1. A single database stays in the calling process.
        version: a text such as "name 1.2", which you change with the code. It stands for a function
            that cannot be frozen, or that would take long to copy: that is then called as it is.

    Returns:
        A target: takes a database to the output.

    Raises:
        TypeError: if the function is not one, reaches something that cannot be frozen (a lock, a
            generator, an open file, a pointer, compiled code of yours), or jobs is not an integer.
        ValueError: if `failure` is not like the output, or jobs is below -1 or 0.
        ModuleNotFoundError: if joblib is not installed.

    Formal guarantees:
        While sampling, a failure (an exception, an exit, a result unlike the output) is an error
        that names the pair, and ends the sampling. On the private database it is released as
        `failure`, without a message, with the noise and the guarantee of any other value: pairs on
        which the function fails are among those that gamma leaves uncovered. Outside of the sampler
        every database counts as private. What is sampled is what is released: `privatize` refuses a
        function of which anything has changed. Assumes that it returns the same for equal databases
        (fixed seeds, solvers run to convergence), and does not depend on what no copy holds: files,
        the environment, settings of installed packages, modules looked up by name at run time; with
        a version, that this names all of the function, in every process that runs it. Not hidden
        are the time it takes, what it prints, and the crash or hang of its process: a program that
        may do so belongs in `command_line`.

        An interruption of the caller (Ctrl-C, a handler of signals that exits) is no failure:
        nothing is released, and a debit stands. The function is left to itself, in a thread of its
        own; it always runs in one, so it can install no handler of signals.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which asks for black-box access alone.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from dpjax import targets
        >>> median = targets.host(np.median, output=jnp.zeros(()))
        >>> float(median(jnp.array([3.0, 1.0, 2.0])))
        2.0
    """
    _checks.function("function", function)
    if version is not None and not (isinstance(version, str) and version):
        raise TypeError(f'version must be a text such as "name 1.2", got {_checks.shown(version)}')
    return host_target(lambda: HostCode(function, version), output, failure, jobs)


def host_target(
    freeze: Callable[[], HostCode], output: Any, failure: Any, jobs: int | None, **options: Any
) -> Callable[[Any], Any]:
    """A target evaluated on the host, by joblib configured with some more options."""
    joblib = _checks.extra("joblib", "host")
    if jobs is not None:
        options["n_jobs"] = _checks.integer("jobs", jobs, least=-1)
        if jobs == 0:
            raise ValueError("jobs must be at least 1, or -1 for all cores, got 0")
    declared = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), output)
    public = _public_value(failure, declared)
    freeze()  # What cannot be frozen is refused here.

    def target(database: Any) -> Any:
        # JAX may call back on a thread of its own, where the caller's configuration is not seen.
        with joblib.parallel_config() as configuration:
            workers = _Workers(configuration | options)
        tracing = _origins.current()
        tracing.settings.append(workers)
        specs = jax.tree.map(_canonical, declared)
        fallback = [leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in public]
        with _origins.host_errors():
            return jax.pure_callback(
                _Evaluation(freeze(), specs, fallback, workers),
                specs,
                tracing.origin,
                jax.tree.map(jnp.asarray, database),
                vmap_method="broadcast_all",
            )

    return target


class _Workers:
    """Where databases are evaluated: that changes no value, so it is in no fingerprint.

    A program is fingerprinted by the text of what is in it, and this text is always the same.
    """

    def __init__(self, configuration: dict[str, Any]):
        self._configuration = configuration

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Workers) and self._configuration == other._configuration

    def __repr__(self) -> str:
        return "workers"

    def map(self, function: Callable[..., Any], tasks: Iterable[Any]) -> list[Any]:
        """The values of a function."""
        joblib = _checks.extra("joblib", "host")
        with joblib.parallel_config(**self._configuration):
            parallel = joblib.Parallel()
            # A loop that an interruption has left behind must not keep others waiting.
            with contextlib.nullcontext() if parallel.n_jobs == 1 else _ONE_AT_A_TIME:
                return parallel(joblib.delayed(function)(*task) for task in tasks)


# Several devices may call back at once, and a backend of processes serves one call at a time.
_ONE_AT_A_TIME = threading.RLock()


@dataclasses.dataclass(frozen=True)
class _Failure:
    reason: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        kind = type(error).__name__
        try:
            return cls(" ".join(f"{kind}: {error}".split()))
        except BaseException:  # The text of a stranger's exception may be one itself.
            return cls(kind)


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation(HostCall):
    """What JAX calls back, on databases that share leading axes."""

    code: HostCode
    output: Any
    failure: list[np.ndarray]
    workers: _Workers

    def __call__(self, origin: Any, database: Any) -> list[np.ndarray]:
        """The leaves of the values; on private databases, only an interruption raises."""
        try:
            # NumPy arrays first of all: to wait for JAX in here may be to wait for ourselves.
            origin = np.asarray(origin)
            batch = origin.shape[:-1]
            origins = origin.reshape(-1, *_origins.SPEC.shape)
            leaves, structure = jax.tree.flatten(database)
            stacked = [np.asarray(x).reshape(len(origins), *x.shape[len(batch) :]) for x in leaves]
            databases = [jax.tree.unflatten(structure, row) for row in zip(*stacked, strict=True)]
            found = aside(functools.partial(self._values, origins, databases))
            values = [self.failure if isinstance(x, _Failure) else x for x in found]
            return [np.stack(x).reshape(batch + x[0].shape) for x in zip(*values, strict=True)]
        except StoppedError as error:
            raise _origins.HostError(str(error)) from None
        except Exception:
            raise
        except BaseException as error:
            _origins.interrupted(error)

    def _values(
        self, origins: np.ndarray, databases: list[Any], wanted: Callable[[], bool]
    ) -> list[list[np.ndarray] | _Failure]:
        attempt = functools.partial(_attempt, self.code.run, self.output)
        tasks = zip(origins, databases, strict=True)
        if len(databases) == 1:
            return [attempt(*task) for task in tasks]
        try:
            return self.workers.map(attempt, (task for task in tasks if wanted()))
        except _origins.HostError:
            raise
        except Exception as error:  # Of the workers: a process was killed, say.
            failure = _Failure.of(error)
            if all(map(_origins.is_private, origins)):
                return [failure] * len(origins)
            _origins.fail(origins, failure.reason)


def _attempt(
    function: Callable[[Any], Any], output: Any, origin: np.ndarray, database: Any
) -> list[np.ndarray] | _Failure:
    """The leaves of the value, as declared; a failure on a sampled database ends all."""
    # The main thread of a worker: elsewhere there are no signals.
    if threading.current_thread() is threading.main_thread():
        return aside(lambda _: _attempt(function, output, origin, database))
    try:
        return _leaves(output, function(database))
    except BaseException as error:  # A program may exit, too.
        failure = _Failure.of(error)
    if _origins.is_private(origin):
        return failure
    _origins.fail(origin[None], failure.reason)


def _leaves(output: Any, value: Any) -> list[np.ndarray]:
    return jax.tree.leaves(jax.tree.map(_as_declared, output, value))


def _as_declared(spec: Any, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != spec.shape or not _same_kind(array.dtype, spec.dtype):
        raise ValueError(
            f"it returned {array.dtype}{list(array.shape)}, not {spec.dtype}{list(spec.shape)}"
        )
    with np.errstate(all="ignore"):
        converted = array.astype(spec.dtype)
    if jnp.issubdtype(spec.dtype, jnp.integer) and np.any(converted != array):
        raise OverflowError(f"it returned integers that {spec.dtype} cannot hold")
    return converted


def _same_kind(dtype: Any, declared: Any) -> bool:
    kinds = (np.bool_, np.integer, jnp.floating)  # JAX's floats are more than NumPy's.
    found, wanted = (
        next((i for i, kind in enumerate(kinds) if jnp.issubdtype(x, kind)), len(kinds))
        for x in (dtype, declared)
    )
    return found <= wanted < len(kinds)


def _public_value(failure: Any, output: Any) -> list[np.ndarray]:
    """The leaves of the value for failures."""
    if failure is None:
        return [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(output)]
    try:
        value = _leaves(output, failure)
    except Exception:
        value = None
    if value is None or not all(np.all(np.isfinite(leaf)) for leaf in value):
        raise ValueError(
            f"failure must be finite and like the output, {output}, got {_checks.shown(failure)}"
        )
    return value


def _canonical(spec: Any) -> Any:
    return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))
