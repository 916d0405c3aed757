"""Host targets: the same as their JAX twins; failures named while sampling, hidden in releases."""

import functools
import importlib
import os
import sys
import threading

import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pytest
from joblib.parallel import ThreadingBackend
from sklearn.svm import SVC

import dpjax
from dpjax import targets
from dpjax._tracing._host_calls import FailedElsewhereError, Role, host_errors, sampled
from dpjax._tracing._programs import Program

N, D = 12, 2
SPEC = jax.ShapeDtypeStruct((N, D), jnp.float32)
VALUE = jax.ShapeDtypeStruct((D,), jnp.float32)
RECORDS = np.random.default_rng(0).normal(size=(N, D)).astype("float32")


@pytest.fixture
def key():
    """Sampling holds no secret: threefry compiles faster."""
    return jax.random.key(20170611)


def oracle(key, n):
    """Numbers in [0, 1) that compile faster than those of `jax.random`."""
    word = jax.random.key_data(key)[0] + jnp.arange(n * D, dtype="uint32") * np.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    return ((word ^ (word >> 13)) >> 8).astype(float).reshape(n, D) / 2**24


def column_means(database):
    return np.mean(database, axis=0)


def distances(key, target, oracle=oracle, m=20, **options):
    return dpjax.sample_distances(key, target, oracle, n=N, norm="l1", m=m, **options)


def pair(key, index):
    """The databases of a pair."""
    records = np.asarray(oracle(jax.random.fold_in(key, index), N + 1))
    return records[:N], np.concatenate([records[: N - 1], records[N:]])


def fails_on(databases, value=(0.0, 0.0)):
    """A function that raises on some databases, which it recognizes."""

    def function(database):
        if any(np.array_equal(database, bad) for bad in databases):
            raise ValueError("no such thing")
        return value

    return function


def at_origin(target, role=Role.NEIGHBOR, index=17, spec=SPEC):
    """The target as the sampler calls it."""
    program = Program.trace("target", target, spec)
    return functools.partial(program, origin=sampled(role, jnp.uint32(index)))


def test_a_host_target_is_a_function_of_jax_arrays():
    target = targets.host(column_means, output=VALUE)
    batch = jnp.stack([RECORDS, RECORDS + 1, RECORDS * 2])
    looped = [column_means(np.asarray(database)) for database in batch]
    np.testing.assert_array_equal(target(batch[0]), looped[0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(target))(batch), looped)
    grid = jax.vmap(jax.vmap(target))(jnp.stack([batch, batch + 1]))
    np.testing.assert_allclose(grid, [looped, np.add(looped, 1)], rtol=1e-6)


def test_parts_of_a_database_may_be_shared():
    target = targets.host(lambda d: d["a"] @ d["b"], output=jax.ShapeDtypeStruct((), float))
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.array([1.0, 0.0, 2.0])
    together = jax.vmap(lambda a: target({"a": a, "b": b}))(a)
    np.testing.assert_array_equal(together, a @ b)


def test_outputs_are_converted_within_their_kind():
    output = {"count": jnp.zeros((), "int32"), "mean": [jnp.zeros((D,)), jnp.zeros((), "float16")]}

    def function(database):
        return {"count": len(database), "mean": [list(np.mean(database, 0, float)), True]}

    value = targets.host(function, output=output)(RECORDS)
    assert jax.tree.map(lambda leaf: leaf.dtype.name, value) == {
        "count": "int32",
        "mean": ["float32", "float16"],
    }
    assert int(value["count"]) == N
    np.testing.assert_allclose(value["mean"][0], RECORDS.mean(0), rtol=1e-6)


def test_float64(x64):
    target = targets.host(lambda d: d.sum(0), output=jax.ShapeDtypeStruct((D,), float))
    records = RECORDS.astype(float)
    assert target(records).dtype == "float64"
    np.testing.assert_array_equal(target(records), records.sum(0))


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: lambda d: f(d) * 1],
    ids=["alone", "jit", "in JAX code"],
)
def test_distances_are_those_of_the_same_function_in_jax(wrap, key):
    expected = distances(key, lambda database: jnp.mean(database, axis=0))
    got = distances(key, wrap(targets.host(column_means, output=VALUE)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_a_sampled_sensitivity_releases(key, keys):
    target = targets.host(column_means, output=VALUE)
    options = {"n": N, "norm": "l1", "m": 20}
    sensitivity = dpjax.sample_sensitivity(key, target, oracle, **options)
    twin = dpjax.sample_sensitivity(key, lambda d: jnp.mean(d, axis=0), oracle, **options)
    assert sensitivity.value == pytest.approx(twin.value, rel=1e-4)
    private = dpjax.privatize(target, dpjax.laplace(sensitivity, epsilon=1e4))
    np.testing.assert_allclose(private(keys(0), RECORDS).value, RECORDS.mean(0), atol=0.01)


# Failures while sampling.


@pytest.mark.parametrize(
    ("side", "name", "wrap"),
    [(0, "the database", lambda f: f), (1, "the neighbor", jax.jit)],
    ids=["database", "neighbor"],
)
def test_a_failure_names_the_pair(side, name, wrap, key):
    target = wrap(targets.host(fails_on([pair(key, 13)[side]]), output=VALUE))
    np.testing.assert_array_equal(target(RECORDS), np.zeros(D))  # Traced before, as private.
    message = rf"^target on the host failed on pair 13 \({name}\): ValueError: no such thing$"
    with pytest.raises(RuntimeError, match=message):
        distances(key, target, chunk_size=8)


def test_a_failure_inside_a_larger_program_names_the_pair(key):
    target = targets.host(fails_on([pair(key, 13)[1]]), output=VALUE)
    with pytest.raises(RuntimeError, match=r"pair 13 \(the neighbor\)"):
        jax.block_until_ready(jax.jit(lambda key: distances(key, target, chunk_size=8))(key))


def test_a_failure_in_the_test_of_order_names_the_database(key):
    database = pair(key, 5)[0]
    rotations = [np.roll(database, steps, axis=0) for steps in range(1, N)]
    target = targets.host(fails_on(rotations), output=VALUE)
    with pytest.raises(RuntimeError, match=r"pair 5 \(the database, its records permuted\)"):
        dpjax.sample_sensitivity(key, target, oracle, n=N, norm="l1", m=20, allow_zero=True)


def test_a_failure_in_an_oracle_names_the_pair(key):
    def function(records):
        if np.array_equal(records, bad):
            raise ValueError("no such thing")
        return records

    bad = np.asarray(oracle(jax.random.fold_in(key, 13), N + 1))
    read = targets.host(function, output=jax.ShapeDtypeStruct((N + 1, D), jnp.float32))
    message = (
        r"^target on the host failed on pair 13 \(the oracle's records\): "
        r"ValueError: no such thing$"
    )
    with pytest.raises(RuntimeError, match=message):
        distances(key, lambda d: jnp.mean(d, axis=0), lambda key, n: read(oracle(key, n)))


def test_a_norm_on_the_host_is_refused(key):
    norm = targets.host(lambda d: np.sum(np.abs(d)), output=jnp.zeros(()))
    with pytest.raises(ValueError, match="norm must be written in JAX"):
        dpjax.sample_distances(key, lambda d: jnp.mean(d, axis=0), oracle, n=N, norm=norm, m=20)


def test_raw_callbacks_are_refused_everywhere(key, keys):
    def raw(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    calls = {
        "target": (lambda d: jnp.mean(raw(d), axis=0), oracle, "l1"),
        "oracle": (column_means, lambda key, n: raw(oracle(key, n)), "l1"),
        "norm": (lambda d: jnp.mean(d, axis=0), oracle, lambda d: jnp.sum(raw(d))),
    }
    for name, (target, records, norm) in calls.items():
        with pytest.raises(ValueError, match=f"{name} must not call code outside of JAX"):
            dpjax.sample_sensitivity(key, target, records, n=N, norm=norm, m=20)
    private = dpjax.privatize(calls["target"][0], dpjax.laplace(1.0, epsilon=1.0))
    with pytest.raises(ValueError, match="target must not call code outside of JAX"):
        private(keys(0), RECORDS)


def test_what_was_finished_before_a_failure_is_kept(key, tmp_path):
    bad, repaired, log = pair(key, 39)[1], tmp_path / "repaired", tmp_path / "log"

    def function(database):
        with log.open("a") as file:
            file.write(".")
        if np.array_equal(database, bad) and not repaired.exists():
            raise ValueError("broken")
        return column_means(database)

    target = targets.host(function, output=VALUE)

    def run(checkpoint):
        log.write_text("")
        options = {"m": 60, "gamma": 0.2, "chunk_size": 8, "checkpoint": tmp_path / checkpoint}
        value = dpjax.sample_sensitivity(key, target, oracle, n=N, norm="l1", **options).value
        return value, len(log.read_text())

    with pytest.raises(RuntimeError, match="pair 39"):
        run("interrupted")
    repaired.touch()
    (resumed, few), (fresh, many) = run("interrupted"), run("fresh")
    assert resumed == fresh
    # Four chunks of eight pairs came before pair 39, each with D, D', a rotation of D, and D with
    # another record replaced. Eight databases of the first chunk were evaluated alone, too.
    assert many - few == 4 * 8 * 4 + 8


class RudeError(Exception):
    def __str__(self):
        raise ValueError("not even a text")


def raising(error):
    def function(database):
        raise error

    return function


FAILURES = {
    "exception": (raising(ValueError("what")), "ValueError: what"),
    "exit": (raising(SystemExit(3)), "SystemExit: 3"),
    "interrupt": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "exception without a text": (raising(RudeError()), "RudeError"),
    "shape": (
        lambda database: database,
        r"the function returned float32\[12, 2\], not float32\[2\]",
    ),
    "structure": (lambda database: {"a": np.zeros(D)}, "the function returned object"),
    "complex": (lambda database: np.zeros(D, complex), r"the function returned complex128\[2\]"),
    "text": (lambda database: np.array(["1", "2"]), "the function returned <U1"),
    "nothing": (lambda database: None, "the function returned object"),
    "writing": (lambda database: np.negative(database, out=database), "read-only"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_every_failure_is_an_error_when_sampling_and_a_fixed_value_otherwise(what, capfd, caplog):
    function, message = FAILURES[what]
    public = np.array([0.25, 0.5], "float32")
    target = targets.host(function, output=VALUE, failure=public)
    np.testing.assert_array_equal(target(RECORDS), public)
    np.testing.assert_array_equal(Program.trace("target", target, SPEC)(RECORDS), public)
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")
    with pytest.raises(RuntimeError, match=rf"failed on pair 17 \(the neighbor\): .*{message}"):
        jax.block_until_ready(at_origin(target)(RECORDS))


def test_integers_that_do_not_fit_are_a_failure():
    output = jax.ShapeDtypeStruct((), jnp.int32)
    for count in (2**31, -(2**31) - 1, 2**70, 1.0):
        target = targets.host(lambda database, count=count: count, output=output)
        assert int(target(RECORDS)) == 0
        with pytest.raises(RuntimeError, match="the function returned"):
            jax.block_until_ready(at_origin(target)(RECORDS))
    largest = targets.host(lambda database: np.uint64(2**31 - 1), output=output)
    assert int(largest(RECORDS)) == 2**31 - 1


def test_nan_is_a_value(key):
    target = targets.host(lambda database: np.full(D, np.nan), output=VALUE)
    assert np.all(np.isnan(at_origin(target)(RECORDS)))
    assert np.all(np.isinf(distances(key, target, m=2)))


# Releases.


def one_label(seed, n=N):
    """Records on which SVC fails, for it wants two classes, and a neighbor on which it does not."""
    x = np.random.default_rng(seed).normal(size=(n, D)).astype("float32")
    same = np.ones(n, "int32")
    return {"x": x, "y": same}, {"x": x, "y": np.where(np.arange(n) == n - 1, -1, same)}


def support_vectors(database):
    model = SVC(kernel="linear", C=1 / len(database["y"]), tol=1e-9)
    return model.fit(database["x"].astype(float), database["y"]).coef_[0]


def test_neighbors_are_released_whether_the_program_fails_or_not(keys):
    public = np.array([5.0, -5.0], "float32")
    target = targets.host(support_vectors, output=VALUE, failure=public)
    sensitivity = dpjax.assume_sensitivity(1.0, norm="l1", n=N)
    private = dpjax.privatize(target, dpjax.laplace(sensitivity, epsilon=1e4))
    failing, working = (private(keys(0), database) for database in one_label(1))
    np.testing.assert_allclose(failing.value, public, atol=0.01)
    exact = support_vectors(one_label(1)[1])
    np.testing.assert_allclose(working.value, exact, atol=0.01)
    assert str(failing.guarantee) == str(working.guarantee)


@pytest.mark.slow
def test_compiled_releases_hide_failures(keys):
    target = targets.host(raising(ValueError()), output=VALUE)
    private = dpjax.privatize(target, dpjax.laplace(1.0, epsilon=1e4))
    one = jax.jit(private)(keys(0), RECORDS)
    np.testing.assert_allclose(one.value, np.zeros(D), atol=0.01)
    several = jax.vmap(private, (0, None))(jax.random.split(keys(0), 3), RECORDS)
    np.testing.assert_allclose(several.value, np.zeros((3, D)), atol=0.01)


def test_a_private_batch_may_fail_in_part():
    target = targets.host(fails_on([RECORDS], (1.0, 1.0)), output=VALUE)
    values = jax.vmap(target)(jnp.stack([RECORDS + 1, RECORDS, RECORDS + 2]))
    np.testing.assert_array_equal(values, [[1, 1], [0, 0], [1, 1]])


# Support vector machines of scikit-learn.


def labelled(key, n):
    x = oracle(key, n) * 2 - 1
    return {"x": x, "y": jnp.where((x[:, 0] > 0) ^ (jnp.abs(x[:, 1]) < 0.2), 1, -1)}


def fit_svc(database, strength=1.0):
    """Weights, intercept, and the multipliers of the dual problem."""
    x, y = database["x"].astype(float), database["y"]
    model = SVC(kernel="linear", C=strength / len(y), tol=1e-10).fit(x, y)
    multipliers = np.zeros(len(y))
    multipliers[model.support_] = np.abs(model.dual_coef_[0])
    return {"w": model.coef_[0], "b": model.intercept_[0], "multipliers": multipliers}


def test_svc_solves_its_problem_exactly(key):
    output = {"w": jnp.zeros(D), "b": jnp.zeros(()), "multipliers": jnp.zeros(N)}
    databases = jax.vmap(lambda key: labelled(key, N))(jax.random.split(key, 5))
    fits = jax.vmap(targets.host(fit_svc, output=output))(databases)
    x, y = np.asarray(databases["x"]), np.asarray(databases["y"])
    w, b, a = (np.asarray(fits[name]) for name in ("w", "b", "multipliers"))
    margins = y * (np.einsum("bnd,bd->bn", x, w) + b[:, None])
    hinges = np.mean(np.maximum(1 - margins, 0), axis=1)
    # The multipliers are feasible, and their value is that of the weights: both are optimal.
    assert np.all((a >= 0) & (a <= 1 / N + 1e-7))
    np.testing.assert_allclose(np.sum(a * y, axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(np.einsum("bn,bnd->bd", a * y, x), w, atol=1e-5)
    squares = np.sum(w**2, axis=1) / 2
    np.testing.assert_allclose(squares + hinges, np.sum(a, axis=1) - squares, atol=1e-5)


@pytest.mark.slow
def test_svc_moves_as_the_same_function_in_jax(key):
    """`linear_svm` is the twin of SVC: neither shares a line with the other."""

    def svc(database):
        fitted = fit_svc({**database, "x": np.clip(database["x"], 0, 1)})
        return {name: fitted[name] for name in ("w", "b")}

    output = {"w": jnp.zeros(D), "b": jnp.zeros(())}
    one = distances(key, targets.host(svc, output=output), labelled)
    twin = distances(key, targets.linear_svm(regularization=1.0), labelled)
    typical = float(jnp.median(one))
    assert typical > 0.05
    np.testing.assert_allclose(twin, one, atol=0.01 * typical)


# Where databases are evaluated.


class Counting(ThreadingBackend):
    """A backend of one's own, in the place of those of Dask and Ray."""

    calls = 0

    def start_call(self):
        type(self).calls += 1
        super().start_call()


def test_the_configuration_of_joblib_counts_when_the_sampler_is_called(key):
    joblib.register_parallel_backend("counting", Counting)
    target = targets.host(column_means, output=VALUE)
    alone = distances(key, target)
    assert Counting.calls == 0
    with joblib.parallel_config("counting", n_jobs=2):
        np.testing.assert_array_equal(distances(key, target), alone)
    after = Counting.calls
    assert after > 0
    np.testing.assert_array_equal(distances(key, target), alone)
    assert Counting.calls == after


def test_threads(key):
    barrier = threading.Barrier(2, timeout=60)

    def function(database):
        barrier.wait()  # Passes where two databases are evaluated at a time.
        return column_means(database)

    with pytest.raises(TypeError, match=r"closure\._cond\._lock"):
        targets.host(function, output=VALUE)
    target = targets.host(function, output=VALUE, version="waiting 1")
    with joblib.parallel_config("threading", n_jobs=2):
        got = distances(key, target, m=4)
    np.testing.assert_allclose(got, distances(key, targets.host(column_means, output=VALUE), m=4))


def test_processes():
    output = jax.ShapeDtypeStruct((2,), jnp.int32)
    target = targets.host(lambda database: [os.getpid(), len(database)], output=output, jobs=2)
    found = np.asarray(jax.vmap(target)(jnp.zeros((20, N, D))))
    assert os.getpid() not in found[:, 0]
    np.testing.assert_array_equal(found[:, 1], N)


def test_processes_run_what_the_caller_does(tmp_path, monkeypatch):
    """They would import a module of their own, and miss what was assigned to its variables."""
    (tmp_path / "helpers.py").write_text(
        "import numpy as np\nscale = 1.0\n"
        "def means(database):\n    return scale * np.mean(database, axis=0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("helpers")
    monkeypatch.delitem(sys.modules, "helpers", raising=False)
    monkeypatch.setitem(sys.modules, "helpers", helpers)
    helpers.scale = 30.0
    target = targets.host(helpers.means, output=VALUE, jobs=2)
    expected = 30 * column_means(RECORDS)
    np.testing.assert_allclose(target(RECORDS), expected, rtol=1e-5)
    both = jax.vmap(target)(jnp.stack([RECORDS, RECORDS]))
    np.testing.assert_allclose(both, [expected, expected], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker stopped")
def test_a_worker_that_dies_is_a_failure():
    def function(database):
        return os._exit(1) if database[0, 0] > 100 else [1.0, 2.0]

    target = targets.host(function, output=VALUE, jobs=2)
    batch = jnp.zeros((4, N, D)).at[2].set(101)
    np.testing.assert_array_equal(jax.vmap(target)(batch), np.zeros((4, D)))
    np.testing.assert_array_equal(jax.vmap(target)(batch[:2]), [[1, 2], [1, 2]])
    program = Program.trace("target", target, SPEC)
    pairs = jnp.arange(4, dtype=jnp.uint32)
    with pytest.raises(RuntimeError, match="TerminatedWorkerError"):
        jax.block_until_ready(
            jax.vmap(lambda d, i: program(d, origin=sampled(Role.DATABASE, i)))(batch, pairs)
        )


# What is compared when releasing.


def fingerprint(target):
    return Program.trace("target", target, SPEC).fingerprint


def test_the_function_and_the_public_value_are_part_of_the_target():
    def scaled(factor):
        return lambda database: factor * column_means(database)

    same = fingerprint(targets.host(scaled(2.0), output=VALUE))
    assert fingerprint(targets.host(scaled(2.0), output=VALUE)) == same
    assert fingerprint(targets.host(scaled(3.0), output=VALUE)) != same
    ones = np.ones(D, "float32")
    assert fingerprint(targets.host(scaled(2.0), output=VALUE, failure=ones)) != same


def test_a_version_stands_for_the_function():
    def named(version):
        return fingerprint(targets.host(lambda d: column_means(d), output=VALUE, version=version))

    assert named("means 1") == named("means 1") != named("means 2")


def test_where_it_is_evaluated_is_compiled_but_no_part_of_the_target():
    def trace(**options):
        target = targets.host(column_means, output=VALUE, **options)
        return Program.trace("target", target, SPEC)

    plain, processes = trace(), trace(jobs=2)
    with joblib.parallel_config("threading", n_jobs=2):
        threads = trace()
    assert plain.fingerprint == processes.fingerprint == threads.fingerprint
    assert plain == trace()
    assert plain not in (processes, threads)


FINGERPRINTS = """
import functools
import jax
import numpy as np
from dpjax import targets
from dpjax._tracing._programs import Program

def means(database, scale=1.0):
    return {"b": scale * np.mean(database["x"]), "a": 0.0}

class Model:
    def __init__(self, *options):
        self.options = options
    def __call__(self, database):
        return {"b": self.options[0], "a": 0.0}

number = jax.ShapeDtypeStruct((), float)
output, records = {"b": number, "a": number}, {"x": jax.ShapeDtypeStruct((5,), "float32")}
for target in (
    targets.host(means, output=output),
    targets.host(means, output=output, failure={"a": 1.0, "b": 2.0}, jobs=2),
    targets.host(functools.partial(means, scale=2.0), output=output),
    targets.host(Model(3.0, {"a": "b"}), output=output),
    targets.command_line(["awk", "{}"], output=output, timeout=1.0),
):
    print(Program.trace("target", target, records).fingerprint)
"""


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process(run_python):
    printed = {run_python(FINGERPRINTS, PYTHONHASHSEED=seed) for seed in ("0", "1")}
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 5


# Arguments.


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="function must be a function"):
        targets.host(3, output=VALUE)
    for version in (1.2, ""):
        with pytest.raises(TypeError, match="version must be a string"):
            targets.host(column_means, output=VALUE, version=version)
    with pytest.raises(ValueError, match="jobs must be at least 1, or -1"):
        targets.host(column_means, output=VALUE, jobs=0)
    with pytest.raises(ValueError, match="jobs"):
        targets.host(column_means, output=VALUE, jobs=-2)
    with pytest.raises(TypeError, match="jobs"):
        targets.host(column_means, output=VALUE, jobs=1.5)
    for failure in (0.0, [0.0], np.zeros(3), np.array([0.0, np.nan]), np.array([0, 1j])):
        with pytest.raises(
            ValueError, match="failure must be finite and have the structure of the output"
        ):
            targets.host(column_means, output=VALUE, failure=failure)


def test_joblib_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "joblib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpjax\[host\]'"):
        targets.host(column_means, output=VALUE)


def test_an_error_of_another_process_stays_its_own():
    text = "process 1 of the call failed: RuntimeError: target on the host failed on pair 50: no"
    with pytest.raises(FailedElsewhereError, match="process 1"), host_errors():
        raise FailedElsewhereError(text)
