"""Interrupted runs: what is finished is kept, nothing is done twice, no other file is taken."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._files import _chunk_files, _durable
from dpjax._running import _devices
from dpjax._running._devices import compilation
from dpjax.sensitivity import _loop

M, SIZE = 100, 30


@pytest.fixture
def sample(key, uniform, tmp_path):
    """A sampling with a checkpoint; each test names what matters to it."""

    def sample(**settings):
        settings = {
            "key": key,
            "target": jnp.max,
            "oracle": uniform,
            "n": 4,
            "norm": "l1",
            "m": M,
            "chunk_size": SIZE,
            "checkpoint": tmp_path / "run",
            **settings,
        }
        arguments = [settings.pop(name) for name in ("key", "target", "oracle")]
        return dpjax.sample_sensitivity(*arguments, **settings)

    return sample


@pytest.fixture
def computed(monkeypatch):
    """The chunks that are computed, in order."""
    chunks = []
    compute = _loop.compute_chunks

    def logged(block, key, position, steps, **settings):
        chunks.extend((position, chunk) for chunk in steps if chunk is not None)
        return compute(block, key, position, steps, **settings)

    monkeypatch.setattr(_loop, "compute_chunks", logged)
    return chunks


def test_a_finished_run_is_not_done_again(sample, computed, tmp_path):
    first = sample()
    assert computed == [(0, chunk) for chunk in range(4)]
    computed.clear()
    again = sample()
    assert computed == []
    assert again.value == first.value == sample(checkpoint=None).value
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["run.0-of-2", "run.3-of-11"])
def test_what_any_number_of_processes_has_left_is_not_done_again(sample, computed, tmp_path, name):
    first = sample()
    (tmp_path / "run").rename(tmp_path / name)
    computed.clear()
    assert sample().value == first.value
    assert computed == []


def test_every_position_is_kept(sample, computed):
    first = sample(positions="each")
    assert len(computed) == 16
    computed.clear()
    assert sample(positions="each").value == first.value
    assert computed == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_finished_survives_an_interruption(sample, computed, monkeypatch, tmp_path, error):
    logged = _loop.compute_chunks

    def interrupted(*arguments, **settings):
        if len(computed) == 2:
            raise error
        return logged(*arguments, **settings)

    with monkeypatch.context() as context:
        context.setattr(_loop, "compute_chunks", interrupted)
        with pytest.raises(error) as ended:
            sample()
    said = f"60 of {M} pairs are saved in {tmp_path / 'run'}: the same call continues from there"
    assert getattr(ended.value, "__notes__", []) == ([said] if error is KeyboardInterrupt else [])
    assert computed == [(0, 0), (0, 1)]
    resumed = sample()
    assert computed == [(0, chunk) for chunk in range(4)]
    assert resumed.value == sample(checkpoint=None).value


def test_without_a_file_an_interruption_says_that_nothing_is_kept(sample, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(_loop, "compute_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt) as ended:
        sample(checkpoint=None)
    assert "no pairs are saved: with checkpoint=PATH" in ended.value.__notes__[0]


def test_chunks_that_a_file_holds_with_fewer_probes_are_drawn_again(sample, computed):
    """32 pairs are probed of gamma .5; the smaller gammas need all 100."""
    loose = sample(gamma=0.5)
    computed.clear()
    assert sample().m == loose.m
    assert computed == [(0, 1), (0, 2), (0, 3)]
    computed.clear()
    sample(gamma=0.5)
    assert computed == []


def test_a_resumed_run_adds_what_probes_had_seen(key, uniform, sample, computed):
    """The order of the records moves this target by little enough to be added."""
    target = lambda d: jnp.max(d) + 0.001 * d[-1]  # noqa: E731
    first = sample(target=target)
    computed.clear()
    assert sample(target=target).value == first.value
    assert computed == []
    distances = dpjax.sample_distances(key, target, uniform, n=4, norm="l1", m=M, chunk_size=SIZE)
    assert 0.001 < first.value - np.sort(distances)[first.k - 1] < 0.002


def test_progress_counts_probes_and_what_was_found(sample, capsys):
    """Probes of a sum, which are databases of their own."""
    sample()
    capsys.readouterr()
    sample(progress=True, gamma=0.1)
    assert re.search(r"100/100 .* pairs/s", capsys.readouterr().err)
    mean = dpjax.targets.summable(lambda x: x, average=True)
    sample(target=mean, progress=True, gamma=0.1, checkpoint=None)
    assert re.search(r"50\.0/50\.0 .* probes/s", capsys.readouterr().err)


OTHERS = {
    "key": lambda keys: {"key": keys(1)},
    "target": lambda _: {"target": jnp.min},
    "oracle": lambda _: {"oracle": lambda key, n: jnp.zeros(n) + key._base_array[0]},
    "norm": lambda _: {"norm": "l2"},
    "n": lambda _: {"n": 5},
    "m": lambda _: {"m": M + 1},
    "chunk size": lambda _: {"chunk_size": 20},
    "positions": lambda _: {"positions": "average"},
}


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "oracle"])
def test_a_file_of_another_run_is_refused(sample, keys, name):
    sample()
    with pytest.raises(ValueError, match=rf"checkpoint .*run belongs to another run, .*{name}"):
        sample(**OTHERS[name](keys))


def test_a_file_of_another_oracle_is_refused(sample, uniform):
    sample()
    with pytest.raises(ValueError, match="belongs to another run, with a different oracle"):
        sample(oracle=lambda key, n: 2 * uniform(key, n))


def test_a_file_of_programs_that_were_compiled_otherwise_is_refused(sample, monkeypatch):
    """Their distances may differ in the last bits."""
    sample()
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=3")
    sample()  # How many devices there are is no part of a program.
    with monkeypatch.context() as context:
        context.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
        with pytest.raises(
            ValueError, match=r"belongs to another run, with a different compiler flags"
        ):
            sample()
    with monkeypatch.context() as context:
        context.setattr(_devices, "_processor", lambda: "another model")
        with pytest.raises(ValueError, match=r"belongs to another run, with a different processor"):
            sample()
    monkeypatch.setattr(_devices, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"belongs to another run, with a different versions"):
        sample()


def test_the_processor_is_known_by_its_vector_instructions():
    """Virtual machines call many processors by one name."""
    found = compilation((None,))["processor"]
    assert re.search(r"\b(avx|sse|asimd|neon|sve)", found) or not Path("/proc/cpuinfo").exists()
    assert found == compilation(tuple(jax.devices("cpu")))["processor"]


def test_a_file_that_claims_another_version_is_corrupted(sample, monkeypatch):
    sample()
    monkeypatch.setattr(_chunk_files.json, "loads", _with_old_version(_chunk_files.json.loads))
    with pytest.raises(ValueError, match="corrupted"):
        sample()  # What a file says of itself is under its hash too.


def test_a_file_that_another_version_wrote_is_refused(sample, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(jax, "__version__", "0.1")
        sample()
    with pytest.raises(ValueError, match="belongs to another run, with a different versions"):
        sample()


def _with_old_version(loads):
    def changed(text):
        header = loads(text)
        header["run"]["versions"] = "jax 0.1"
        return header

    return changed


@pytest.mark.parametrize("length", [-1, -100, 150])
def test_a_truncated_file_is_refused(sample, tmp_path, length):
    sample()
    file = tmp_path / "run"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"checkpoint .*run is (truncated|corrupted)"):
        sample()


@pytest.mark.parametrize("place", [30, 200, -3, -500])
def test_a_corrupted_file_is_refused(sample, tmp_path, place):
    sample()
    file = tmp_path / "run"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"checkpoint .*run is corrupted"):
        sample()


@pytest.mark.parametrize("content", [b"", b"something else\n"])
def test_a_file_of_something_else_is_refused_and_kept(sample, tmp_path, content):
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        sample()
    assert (tmp_path / "run").read_bytes() == content


def test_a_folder_that_is_missing_is_named(sample, tmp_path):
    with pytest.raises(ValueError, match="must be in a folder that exists"):
        sample(checkpoint=tmp_path / "missing" / "run")


def test_writing_is_atomic(sample, tmp_path, monkeypatch):
    """A run that dies while it writes leaves the file as it was, and a partial one that is not."""
    sample()
    before = (tmp_path / "run").read_bytes()
    (tmp_path / f"run.{_durable._host()}.7.partial").write_bytes(before[:50])
    assert sample().value == sample(checkpoint=None).value
    order = []
    monkeypatch.setattr(os, "fsync", lambda _: order.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *_: order.append("rename"))
    (tmp_path / "run").unlink()
    sample()
    assert order[:3] == ["fsync", "rename", "fsync"]


WRITING = """
import sys, time
from dpjax._files import _durable
def parts():
    yield b"some"
    print("writing", flush=True)
    time.sleep(600)
_durable.replace(_durable.pathlib.Path(sys.argv[1]), parts())
"""


def test_two_threads_that_write_one_file_do_not_mix_it(tmp_path):
    """They shared a partial file, and the second emptied what the first was writing."""
    path, parts = tmp_path / "run", [bytes([i]) * 1000 for i in range(2)]

    def slowly():
        yield parts[0]
        _durable.replace(path, [parts[1]])
        assert path.read_bytes() == parts[1]
        yield parts[0]

    _durable.replace(path, slowly())
    assert path.read_bytes() == 2 * parts[0]
    with pytest.raises(ZeroDivisionError):
        _durable.replace(path, (bytes(1 // i) for i in range(2)))
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_what_killed_runs_have_left_is_removed_and_nothing_else(sample, environment, tmp_path):
    """Not what a living process writes, what other hosts do, or files of another checkpoint."""
    host = _durable._host()
    kept = [f"run.elsewhere{host}.7.partial", f"run2.{host}.7.partial", f"run.{host}.7.partial.old"]
    left = [f"run.{host}.{2**22 + 1}.partial", f"run.{host}.{os.getpid()}.partial"]
    left.append(f"run.1-of-4.{host}.7.partial")
    for name in (*kept, *left):
        (tmp_path / name).write_bytes(b"some")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path / "run")],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "writing\n"
        (written,) = {file.name for file in tmp_path.iterdir()} - {*kept, *left}
        sample()
        assert {file.name for file in tmp_path.iterdir()} == {"run", written, *kept}
    finally:
        process.kill()
        process.communicate()
    sample()
    assert {file.name for file in tmp_path.iterdir()} == {"run", *kept}


RUN = """
import jax, jax.numpy as jnp, dpjax
from dpjax._running import _devices
from dpjax.sensitivity import _loop
from dpjax._running._devices import compilation
compute = _loop.compute_chunks
def logged(block, key, position, chunks, **settings):
    out = compute(block, key, position, chunks, **settings)
    with open(log, "a") as file:
        file.write("".join(f"{chunk} " for chunk in chunks))
    return out
_loop.compute_chunks = logged
value = dpjax.sample_sensitivity(
    jax.random.key(0), lambda x: jnp.mean(jnp.sort(x)), lambda key, n: jax.random.normal(key, (n,)),
    n=1000, norm="l1", m=6_000, gamma=0.05, chunk_size=200, checkpoint=path,
).value
answer(value)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, kills, fork_python):
    random = np.random.default_rng(0)
    path, log = tmp_path / "run", tmp_path / "log"

    def start(checkpoint):
        log.write_text("")
        return fork_python(RUN, path=str(checkpoint), log=str(log))

    def stored():
        if not path.exists():
            return set()
        keys, *_ = _chunk_files.read_chunk(path, "checkpoint").arrays
        return set(keys[:, 1].tolist())

    known = set()
    for _ in range(kills):
        process, _ = start(path)
        while not (log.read_text() and path.exists()) and process.is_alive():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        process.join()
        assert not known & set(map(int, log.read_text().split()))
        assert known <= stored()
        known = stored()
    assert known
    _, resumed = start(path)
    value = resumed()
    assert not known & set(map(int, log.read_text().split()))
    _, uninterrupted = start(tmp_path / "other")
    assert value == uninterrupted() is not None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "other", "run"]
