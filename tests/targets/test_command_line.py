"""Programs of the command line: a CSV goes in, numbers come out, and nothing is left behind."""

import functools
import os
import select
import signal
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets
from dpjax._tracing._host_calls import Role, sampled
from dpjax._tracing._programs import Program
from dpjax.targets import _command_line
from tables import no_refusal

N, D = 12, 2
SPEC = jax.ShapeDtypeStruct((N, D), jnp.float32)
VALUE = jax.ShapeDtypeStruct((D,), jnp.float32)
RECORDS = np.random.default_rng(0).normal(size=(N, D)).astype("float32")
MEANS = ["awk", "-F,", '{ a += $1; b += $2 } END { printf "%.9g, %.9g\\n", a / NR, b / NR }']
command = functools.partial(targets.command_line, output=VALUE, timeout=60.0)


@pytest.fixture
def key():
    """Sampling holds no secret: threefry compiles faster."""
    return jax.random.key(20170611)


def oracle(key, n):
    """Numbers in [0, 1) that compile faster than those of `jax.random`."""
    word = jax.random.key_data(key)[0] + jnp.arange(n * D, dtype="uint32") * np.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    return ((word ^ (word >> 13)) >> 8).astype(float).reshape(n, D) / 2**24


def shell(script, **options):
    return command(["sh", "-c", script], **options)


def sampled_value(target, records=RECORDS):
    """The value where the sampler asks for it: there, failures are errors."""
    program = Program.trace("target", target, SPEC)
    origin = sampled(Role.DATABASE, jnp.uint32(3))
    return np.asarray(program(records, origin=origin))


@pytest.mark.parametrize("jobs", [None, 2])
def test_the_sensitivity_is_that_of_the_same_function_in_jax(jobs, key, keys):
    options = {"n": N, "norm": "l1", "m": 20}
    target = command(MEANS, jobs=jobs)
    sensitivity = dpjax.sample_sensitivity(key, target, oracle, **options)
    twin = dpjax.sample_sensitivity(key, lambda d: jnp.mean(d, axis=0), oracle, **options)
    assert sensitivity.value == pytest.approx(twin.value, rel=1e-4)
    private = dpjax.privatize(target, dpjax.laplace(sensitivity, epsilon=1e4))
    np.testing.assert_allclose(private(keys(0), RECORDS).value, RECORDS.mean(0), atol=0.01)


def test_numbers_arrive_as_they_are():
    database = {
        "c": np.array([True, False, True]),
        "a": np.array([[0.1, 1e-30], [np.inf, -3e38], [np.nan, 1 / 3]], "float32"),
        "b": np.array([2**31 - 1, -5, 0], "int32"),
    }
    echo = command(["cat"], output=jax.ShapeDtypeStruct((3, 4), jnp.float32))
    expected = np.column_stack([database["a"], database["b"].astype("float32"), database["c"]])
    np.testing.assert_array_equal(echo(database), expected.astype("float32"))
    whole = command(["cat"], output=jax.ShapeDtypeStruct((3,), jnp.int32))
    np.testing.assert_array_equal(whole({"b": database["b"]}), database["b"])


def test_numbers_arrive_as_they_are_in_float64(x64):
    database = np.random.default_rng(1).normal(size=(5, 2)) * 10.0 ** np.arange(-300, 700, 500)
    echo = command(["cat"], output=jax.ShapeDtypeStruct((5, 2), float))
    np.testing.assert_array_equal(echo(database), database)


def test_numbers_fill_the_output_in_order():
    output = {"b": jnp.zeros((2, 2)), "a": jnp.zeros((), "int32")}
    value = shell("echo 7; echo 1,2 3, 4", output=output)(RECORDS)
    assert int(value["a"]) == 7
    np.testing.assert_array_equal(value["b"], [[1, 2], [3, 4]])


FAILURES = {
    "status": ("echo 1 2; echo broken >&2; exit 3", "the program ended with status 3: broken"),
    "crash": ("kill -SEGV $$", "the program ended with status -11"),
    "too few numbers": ("echo 1", "the program printed 1 of 2 numbers"),
    "too many numbers": ("echo 1 2 3", "the program printed more than 2 numbers"),
    "too many at the end": ("printf '1 2 3'", "the program printed more than 2 numbers"),
    "nothing": ("true", "the program printed 0 of 2 numbers"),
    "a long word": ("echo 1; printf '%01025d' 2", "a word of more than 1024 bytes"),
    "an early end of output": ("echo 1 2; exec >&- 2>&-; sleep 0.2; exit 3", "status 3"),
    "a large file": ("truncate -s 257M $(mktemp -d)/x && echo 1 2", "status 153"),
    "no number": ("echo 1 two", "could not convert"),
    "no text": (r"printf '\377\377'", "UnicodeDecodeError"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_failures_are_errors_when_sampling_and_a_fixed_value_otherwise(what, capfd, caplog):
    script, message = FAILURES[what]
    target = shell(script, failure=np.array([0.5, -0.5]))
    np.testing.assert_array_equal(target(RECORDS), [0.5, -0.5])
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")
    with pytest.raises(RuntimeError, match=rf"failed on pair 3 \(the database\): .*{message}"):
        sampled_value(target)


ENDLESS = {
    "numbers": ("yes 1", "the program printed more than 2 numbers"),
    "numbers in one line": ("yes 1 | tr '\\n' ' '", "the program printed more than 2 numbers"),
    "numbers of many children": (
        "yes 1 & yes 2 & yes 3 & wait",
        "the program printed more than 2 numbers",
    ),
    "a word": ("tr '\\0' 1 < /dev/zero", "a word of more than 1024 bytes"),
    "bytes": ("cat /dev/zero", "a word of more than 1024 bytes"),
    "white space": ("yes ''", "took longer"),
    "complaints": ("echo 1 2; yes broken >&2", "took longer"),
    "what is left behind": ("(yes '' &) ; echo 1 2", None),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_memory_does_not_depend_on_what_a_program_prints(what):
    """How much it prints may depend on records, and a caller that is killed releases nothing.

    It took all memory within a minute. What grows without end: numbers, one word, white space,
    complaints, and what children print that outlive the program.
    """
    script, message = ENDLESS[what]
    timeout = 1.0 if message == "took longer" else 60.0
    program = _command_line._Program(("sh", "-c", script), timeout, VALUE)
    tracemalloc.start()
    try:
        if message is None:
            np.testing.assert_array_equal(program(RECORDS), [1, 2])
        else:
            with pytest.raises((ValueError, TimeoutError), match=message):
                program(RECORDS)
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def test_numbers_may_be_far_apart_and_in_many_pieces():
    """Pieces are cut anywhere, also in the middle of a number."""
    script = "for i in 1 2 3 4 5 6; do printf '%s' 0.$i; sleep 0.05; printf '%s, ' 25; done"
    target = command(["sh", "-c", script], output=np.zeros(6))
    np.testing.assert_allclose(target(RECORDS), np.arange(1, 7) / 10 + 0.025)
    spaces = command(["sh", "-c", "echo 1; head -c 300000 /dev/zero | tr '\\0' ' '; echo 2"])
    np.testing.assert_array_equal(spaces(RECORDS), [1, 2])


def test_who_holds_the_pipe_is_not_waited_for():
    for child in ("sleep 600", "setsid sleep 30"):
        found = shell(f"{child} & echo 1 2", timeout=15.0)(RECORDS)
        np.testing.assert_array_equal(found, [1, 2])


def test_a_process_that_cannot_be_ended_is_not_waited_for():
    """Such as one that belongs to another user, and holds the pipes."""
    pipes, heard = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), []
    script = "sleep 60 & echo 1 2"
    with subprocess.Popen(["sh", "-c", script], bufsize=0, start_new_session=True, **pipes) as one:
        try:
            with no_refusal(TimeoutError):
                _command_line.converse(one, b"", heard.append, lambda _: None, timeout=10.0)
        finally:
            os.killpg(one.pid, signal.SIGKILL)
    assert b"".join(heard) == b"1 2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems choose in other ways")
def test_where_memory_runs_out_the_program_is_ended():
    np.testing.assert_array_equal(shell("cat /proc/self/oom_score_adj; echo 2")(RECORDS), [1000, 2])


def test_a_program_that_does_not_exist_is_refused(tmp_path):
    """It is a public fact, so it is no failure to hide."""
    with pytest.raises(FileNotFoundError, match="no program 'no-such-program-anywhere'"):
        command(["no-such-program-anywhere"])
    program = tmp_path / "program"
    program.write_text("echo 1 2")
    with pytest.raises(FileNotFoundError, match=r"no program .*program' can be run here"):
        command([str(program)])


@pytest.fixture
def private_script(tmp_path):
    """A script, and how it is released with next to no noise."""
    script = tmp_path / "program"
    script.write_text("#!/bin/sh\necho 1 2\n")
    script.chmod(0o700)
    mechanism = dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1", n=N), epsilon=1e6)
    return script, lambda *arguments: dpjax.privatize(command([*arguments]), mechanism)


def test_a_program_that_is_gone_is_refused_before_a_release(private_script, keys):
    script, release = private_script
    private = release(str(script))
    np.testing.assert_allclose(private(keys(0), RECORDS).value, [1, 2], atol=0.01)
    script.unlink()
    with pytest.raises(FileNotFoundError, match="no program"):
        private(keys(0), RECORDS)


def test_the_contents_of_programs_and_scripts_are_part_of_the_target(private_script):
    script, _ = private_script

    def fingerprint(*arguments):
        return Program.trace("target", command([*arguments]), SPEC).fingerprint

    for arguments in ([str(script)], ["sh", str(script)]):
        script.write_text("#!/bin/sh\necho 1 2\n")
        traced = Program.trace("target", command(arguments), SPEC)
        assert traced.fingerprint == fingerprint(*arguments)
        script.write_text("#!/bin/sh\necho 3 4\n")
        assert traced.fingerprint != fingerprint(*arguments)
        with pytest.raises(ValueError, match="has changed since the target was traced"):
            traced.check_unchanged("target")


def test_a_program_need_not_read_its_input():
    many = jax.ShapeDtypeStruct((10**5, D), jnp.float32)  # More than a pipe holds.
    np.testing.assert_array_equal(shell("echo 1 2")(jnp.zeros(many.shape)), [1, 2])


@pytest.mark.parametrize(
    "script",
    ["exec 3> {fifo}; sleep 600 & wait", "exec 3> {fifo}; trap '' TERM; sleep 600 & sleep 600"],
    ids=["waiting", "ignoring signals"],
)
def test_the_timeout_ends_a_program_and_its_children(script, tmp_path):
    fifo = tmp_path / "held open by all of them"
    os.mkfifo(fifo)
    target = shell(script.format(fifo=f"'{fifo}'"), timeout=0.3)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        np.testing.assert_array_equal(target(RECORDS), np.zeros(D))
        assert hung_up(reader)
        with pytest.raises(RuntimeError, match=r"TimeoutError: the program took longer than 0.3 s"):
            sampled_value(target)
    finally:
        os.close(reader)


def test_what_a_program_leaves_behind_is_ended(tmp_path):
    fifo = tmp_path / "held open"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        target = shell(f"exec 3> '{fifo}'; sleep 600 > /dev/null 2>&1 < /dev/null & echo 1 2")
        np.testing.assert_array_equal(target(RECORDS), [1, 2])
        assert hung_up(reader)
    finally:
        os.close(reader)


def hung_up(reader):
    """Whether all that had a pipe open for writing have ended."""
    poll = select.poll()
    poll.register(reader, select.POLLHUP)
    return bool(poll.poll(10_000))


def test_the_arguments_and_the_timeout_are_part_of_the_target():
    def fingerprint(*arguments, timeout=60.0):
        target = command([*arguments], timeout=timeout)
        return Program.trace("target", target, SPEC).fingerprint

    assert fingerprint("awk", "1") == fingerprint("awk", "1")
    assert fingerprint("awk", "1") != fingerprint("awk", "2")
    assert fingerprint("awk", "1") != fingerprint("awk", "1", timeout=1.0)


def test_a_python_script(tmp_path):
    script = tmp_path / "means.py"
    script.write_text(
        "import sys\n"
        "rows = [[float(x) for x in line.split(',')] for line in sys.stdin]\n"
        "print(*(sum(column) / len(rows) for column in zip(*rows)))\n"
    )
    value = command([sys.executable, "-S", str(script)])(RECORDS)
    np.testing.assert_allclose(value, RECORDS.mean(0), rtol=1e-5, atol=1e-7)


def test_bad_arguments_are_refused():
    for arguments in ("cat", ["cat", 3], [b"cat"]):
        with pytest.raises(TypeError, match="arguments must be a sequence of strings"):
            command(arguments)
    with pytest.raises(ValueError, match="arguments must name a program"):
        command([])
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            command(["cat"], timeout=bad)
    with pytest.raises(TypeError, match="timeout"):
        command(["cat"], timeout=None)
    with pytest.raises(ValueError, match="failure"):
        command(["cat"], failure=np.zeros(3))
