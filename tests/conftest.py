"""Strict JAX for all tests, and the fixtures that they share."""

import functools
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dpjax
from cpu_time import day_of_commit, left_out, long_tests

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

ROOT = Path(__file__).resolve().parent.parent

# Tests compile the same programs over and over, in several workers. To read even the smallest takes
# a tenth of the time.
CACHE = str(ROOT / ".pytest_cache" / "xla")
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
# Where a program was written down is noted for every operation: a tenth of the time of tracing.
jax.config.update("jax_traceback_in_locations_limit", 0)
# The processes that tests start do the same.
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


COLLECTED = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks tests that take long, before the marks are looked at."""
    known = long_tests()
    config.stash[COLLECTED] = {item.nodeid for item in items}
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")} | known
    fast, known = config.stash[COLLECTED] - slow, known & config.stash[COLLECTED]
    not_in_ci = left_out(fast, known, day_of_commit())
    for item in items:
        if item.nodeid in known:
            item.add_marker(pytest.mark.slow)
            if item.nodeid not in not_in_ci:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    """Garbage is looked for less often, and not in what is imported: a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture
def collected(pytestconfig):
    """The names of all tests that were found, also of those that do not run."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compilation slows down in a process that holds thousands of programs."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """Enables float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def key():
    """The fixed key of a test that needs one."""
    return dpjax.random.seeded_key(20170611)


@pytest.fixture(scope="session")
def keys():
    """Fixed keys for tests that need several: `keys(i)`."""
    return dpjax.random.seeded_key


@pytest.fixture(scope="session")
def reference():
    """Recorded numbers: `reference("r_diffpriv")` or `reference("peers")`, a dict."""

    @functools.cache
    def load(name):
        return json.loads((ROOT / "tests" / "reference" / f"{name}.json").read_text())

    return load


@pytest.fixture
def compilations(caplog):
    """Names of what XLA compiles while a function runs: `compilations(function)`."""

    def names(function):
        caplog.clear()
        with jax.log_compiles():
            jax.block_until_ready(function())
        done = "Finished XLA compilation of "
        messages = [record.getMessage() for record in caplog.records]
        return [text.removeprefix(done).split(" in ")[0] for text in messages if done in text]

    return names


@pytest.fixture(scope="session")
def environment():
    """The variables of a process that imports dpjax from here: `environment(devices=8, **more)`.

    `devices` are those that its CPU plays. It compiles by the flags of this process, to which they
    are added: other flags give other last bits, and longer compilation.
    """

    def variables(*, devices=None, **more):
        flags = [os.environ.get("XLA_FLAGS", "")]
        if devices is not None:
            flags.append(f"--xla_force_host_platform_device_count={devices}")
        search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": search_path, "XLA_FLAGS": " ".join(flags), **more}

    return variables


@pytest.fixture(scope="session")
def run_python(environment):
    """Runs a program in a fresh process, at the root of the repository: `run_python(code, **env)`.

    Returns what it prints; `timeout` is in seconds, and the rest is for `environment`.
    """

    def run(code, *, timeout=None, **variables):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture(scope="session")
def fork_python():
    """Runs a program in a process that has imported dpjax already: `fork_python(code, **names)`.

    Returns the process, for `kill` and `join`, and a function: `answered(seconds)` waits for what
    the program hands to its `answer`, and gives None where nothing comes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpjax"])

    def start(code, **names):
        answers, sender = context.Pipe(duplex=False)
        process = context.Process(target=exec, args=(code, {"answer": sender.send, **names}))
        process.start()
        sender.close()

        def answered(seconds=600):
            return answers.recv() if answers.poll(seconds) else None

        return process, answered

    return start


SEVERAL = """
import json, traceback
failed = dict()
for name, program in PROGRAMS.items():
    try:
        exec(compile(program, name, "exec"), dict(__name__="__main__"))
    except Exception:
        failed[name] = traceback.format_exc()
print()
print(json.dumps(failed))
"""


@pytest.fixture(scope="session")
def failures_of(run_python):
    """Runs programs in one fresh process, which takes seconds to start: `failures_of(programs)`.

    Each has a namespace of its own. Returns what those raised that failed, by name.
    """

    def run(programs, **variables):
        printed = run_python(f"PROGRAMS = {programs!r}\n{SEVERAL}", **variables)
        return json.loads(printed.splitlines()[-1])

    return run
