"""Interruptions of host targets: nothing is released in their place, and nobody waits for long.

Python runs the handlers of signals in the main thread, between any two of its instructions. So one
may arrive while a release computes its target alone (there, or in a thread of XLA), while the
sampler or a sweep computes a batch, in a worker process, and while a program of the command line
runs. Each of them is tried here, by Ctrl-C, by a handler that exits, and by one that raises
something else. What the function raises by itself is a failure: tests/targets/test_host.py.
"""

import contextlib
import os
import select
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets
from dpjax._tracing._host_calls import Role, StoppedError, aside, heeding_ctrl_c, sampled
from dpjax._tracing._programs import Program
from dpjax.targets import _host

N = 5
RECORDS = np.arange(N, dtype="float32")
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


class TooLate(BaseException):
    """What a guard of tests may raise."""


SIGNALS = {
    "Ctrl-C": (signal.SIGINT, KeyboardInterrupt),
    "exit": (signal.SIGTERM, SystemExit),
    "alarm": (signal.SIGALRM, TooLate),
}


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that raise, as programs have them. A shell makes its background deaf to Ctrl-C."""

    def handler(number, frame):
        raise {number: error for number, error in SIGNALS.values()}[number]

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGALRM)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, old in before.items():
        signal.signal(number, old)


def oracle(key, n):
    """Numbers that compile faster than those of `jax.random`."""
    word = jax.random.key_data(key)[0] + jnp.arange(n, dtype="uint32") * np.uint32(0x9E3779B9)
    return (word >> 8).astype(float)


def interrupted(number=signal.SIGINT, times=None):
    """A function that is interrupted from outside, as long as a file is there, and swallows it."""

    def function(database):
        if times is None or os.path.exists(times):
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), number)
                time.sleep(3)
        return np.mean(database)

    return function


@pytest.mark.parametrize("what", SIGNALS)
def test_nothing_is_released_and_the_debit_stands(what, tmp_path, keys):
    """The value for failures would be false, and the ledger would give it again, for ever."""
    number, error = SIGNALS[what]
    times = tmp_path / "interrupted"
    times.touch()
    target = targets.host(interrupted(number, str(times)), output=NUMBER, failure=100.0)
    sensitivity = dpjax.assume_sensitivity(1.0, norm="l1", n=N)
    with dpjax.Ledger(tmp_path / "ledger", epsilon=3e5) as ledger:
        private = dpjax.privatize(target, dpjax.laplace(sensitivity, epsilon=1e5))
        with pytest.raises(BaseException) as found:  # noqa: PT011
            private(keys(0), RECORDS, name="all")
        assert found.type is error
        assert [row["kept"] for row in ledger.history()] == [False]
        times.unlink()
        assert float(private(keys(1), RECORDS, name="all").value) == pytest.approx(
            RECORDS.mean(), abs=0.01
        )
        assert [row["kept"] for row in ledger.history()] == [True, True]
    assert ledger.spent.epsilon == 2e5


CALLS = {
    "alone": lambda target: target(RECORDS),
    "a batch": lambda target: jax.vmap(target)(jnp.stack([RECORDS, RECORDS])),
    "a sample": lambda target: dpjax.sample_sensitivity(
        jax.random.key(0), target, oracle, n=N, norm="l1", m=20
    ),
    "distances": lambda target: dpjax.sample_distances(
        jax.random.key(0), target, oracle, n=N, norm="l1", m=20
    ),
    "a sweep": lambda target: dpjax.sweep(
        jax.random.key(0), lambda key: target(oracle(key, N)), repeats=4
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_every_call_is_interrupted(what, capfd, caplog):
    with pytest.raises(KeyboardInterrupt):
        CALLS[what](targets.host(interrupted(), output=NUMBER))
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_a_program_of_the_user_fails():
    target = jax.jit(targets.host(interrupted(), output=NUMBER))
    with pytest.raises(jax.errors.JaxRuntimeError, match="interrupted by KeyboardInterrupt"):
        target(RECORDS)


def test_ctrl_c_is_heard_while_xla_computes_in_threads_of_its_own():
    """As on a GPU: the main thread waits in XLA, so that only a host call can hear the signal."""
    begun, found = threading.Event(), []

    def waiting(wanted):
        begun.set()
        threading.Event().wait(3)

    def call_of_xla():
        try:
            aside(waiting)
        except StoppedError as ended:
            found.append(ended)

    with heeding_ctrl_c():
        thread = threading.Thread(target=call_of_xla)
        thread.start()
        begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        thread.join(60)
    assert len(found) == 1


def test_another_thread_is_told_that_its_call_was_stopped():
    """Ctrl-C asks all of a process to end; nobody may take what is left for a value."""
    begun, found = threading.Event(), []

    def function(database):
        begun.set()
        threading.Event().wait(3)
        return 0.0

    def elsewhere():
        try:
            found.append(targets.host(function, output=NUMBER, version="waiting 1")(RECORDS))
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    begun.wait(60)
    with pytest.raises(KeyboardInterrupt):
        aside(lambda wanted: interrupted()(RECORDS))
    thread.join(60)
    assert found == ["target on the host was stopped, because another of its calls was interrupted"]


def test_a_failure_elsewhere_stops_no_call(tmp_path):
    found, go = [], threading.Event()
    thread = threading.Thread(
        target=lambda: found.append(aside(lambda wanted: go.wait(60) and wanted()))
    )
    thread.start()
    with pytest.raises(RuntimeError, match="no such thing"):
        CALLS["distances"](targets.host(logged(str(tmp_path / "log")), output=NUMBER))
    go.set()
    thread.join(60)
    assert found == [True]


@pytest.mark.slow
def test_a_worker_that_is_interrupted_interrupts_the_caller():
    """A terminal sends Ctrl-C to all processes: theirs is no failure either."""
    target = targets.host(interrupted(), output=NUMBER, jobs=2)
    with pytest.raises(KeyboardInterrupt):
        jax.vmap(target)(jnp.stack([RECORDS] * 4))


@pytest.mark.parametrize("jobs", [None, 2])
def test_programs_of_the_command_line_end_with_the_call(jobs, tmp_path):
    fifo = tmp_path / "held open"
    os.mkfifo(fifo)
    target = targets.command_line(
        ["sh", "-c", f"exec 3> '{fifo}'; kill -INT {os.getpid()}; sleep 600 & sleep 600"],
        output=NUMBER,
        timeout=600,
        jobs=jobs,
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(KeyboardInterrupt):
            jax.vmap(target)(jnp.stack([RECORDS] * 4))
        poll = select.poll()
        poll.register(reader, select.POLLHUP)
        assert poll.poll(10_000)
    finally:
        os.close(reader)


# Failures while sampling.


def logged(path):
    """A function that leaves a trace of every call, and fails."""

    def function(database):
        with open(path, "a") as file:
            file.write(".")
        raise ValueError("no such thing")

    return function


@pytest.mark.parametrize("what", ["a sample", "distances"])
def test_the_first_failure_ends_the_sampling(what, tmp_path, capfd, caplog):
    """A program that hangs on every database would hang once for each of a chunk."""
    log = tmp_path / "log"
    with pytest.raises(
        RuntimeError, match=r"^target on the host failed on pair 0 .*: no such thing$"
    ):
        CALLS[what](targets.host(logged(str(log)), output=NUMBER))
    assert log.read_text() == "."
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_a_worker_that_is_killed_is_blamed_on_no_single_pair(monkeypatch):
    """Nor does it decide whether private values are released."""

    def killed(*_):
        raise OSError("a worker was killed")

    monkeypatch.setattr(_host._Workers, "map", killed)
    target = targets.host(np.mean, output=NUMBER, failure=7.0)
    batch = jnp.stack([RECORDS] * 4)
    np.testing.assert_array_equal(jax.vmap(target)(batch), np.full(4, 7))
    program = Program.trace("target", target, SPEC)
    at = jax.vmap(lambda d, i: program(d, origin=sampled(Role.DATABASE, i)))
    message = (
        r"target on the host failed on one of the pairs 3 to 6 \(the database\): OSError: a worker"
    )
    with pytest.raises(RuntimeError, match=message):
        jax.block_until_ready(at(batch, jnp.arange(3, 7, dtype=jnp.uint32)))


def test_a_backend_serves_one_call_at_a_time(monkeypatch):
    """Several devices call back at once, and backends of joblib keep what they do in one place."""
    both = threading.Barrier(2, timeout=1)
    met = []

    def function(number):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
            met.append(number)

    workers = _host._Workers({"backend": "threading", "n_jobs": 2})
    threads = [threading.Thread(target=workers.map, args=(function, [(i,)])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
