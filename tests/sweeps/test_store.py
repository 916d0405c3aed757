"""Sweeps on disk: what is finished is kept, nothing is done twice, nothing else is taken."""

import contextlib
import json
import os
import random
import re
import time

import jax
import numpy as np
import pytest
import xarray

import dpjax
from dpjax._files import _chunk_files, _durable
from dpjax._running import _devices, _progress
from dpjax.sweeps import _store, _sweep

XS, REPEATS, SIZE = (0.5, 1.0, 2.0), 4, 5


@pytest.fixture
def swept(key, draw, tmp_path):
    """A sweep with a folder; each test names what matters to it."""

    def swept(**settings):
        settings = {
            "key": key,
            "function": draw,
            "traced": {"x": XS},
            "static": {"shift": [0, 1]},
            "repeats": REPEATS,
            "chunk_size": SIZE,
            "path": tmp_path / "sweep",
            **settings,
        }
        return dpjax.sweep(settings.pop("key"), settings.pop("function"), **settings)

    return swept


@pytest.fixture
def computed(monkeypatch):
    """The cells that are computed, in order, without those that fill up a chunk."""
    cells = []
    compute = _sweep._run_chunk

    def logged(key, words, values, **settings):
        cells.extend(row for row in map(tuple, words.tolist()) if row not in cells)
        return compute(key, words, values, **settings)

    monkeypatch.setattr(_sweep, "_run_chunk", logged)
    return cells


def test_zero_has_no_sign(key, tmp_path):
    """Both are one value of a grid, so a folder may hold what was computed at the other.

    In arrays of a cell they are two, by their fingerprints; a static one is part of a program.
    """

    def sweep(zero, path=None):
        return dpjax.sweep(key, lambda key, x: 1 / x, traced={"x": [zero, 2.0]}, path=path)

    alone, folder = sweep(-0.0), tmp_path / "sweep"
    sweep(0.0, folder)
    xarray.testing.assert_equal(alone, sweep(-0.0, folder))
    xarray.testing.assert_equal(alone, sweep(0.0))


def test_what_is_there_is_not_done_again(swept, computed, tmp_path):
    first = swept()
    assert len(computed) == 24
    computed.clear()
    again = swept(chunk_size=None)
    assert computed == []
    assert (again.attrs["cells_computed"], again.attrs["cells_found"]) == (0, 24)
    xarray.testing.assert_equal(again, first)
    xarray.testing.assert_equal(swept(path=None), first)
    assert len(list((tmp_path / "sweep").glob("*.chunk"))) == 2 * 3


@pytest.mark.parametrize(
    ("more", "cells"),
    [
        ({"traced": {"x": (0.25, *XS)}}, 2 * REPEATS),
        ({"traced": {"x": XS[1:]}}, 0),
        ({"repeats": REPEATS + 1}, 2 * len(XS)),
        ({"static": {"shift": [2, 1, 0]}}, len(XS) * REPEATS),
    ],
    ids=["a value", "fewer values", "a repeat", "a choice"],
)
def test_an_extended_sweep_computes_its_own_cells_only(swept, computed, more, cells):
    first = swept()
    before = set(computed)
    computed.clear()
    larger = swept(**more)
    assert len(computed) == cells
    assert not before & set(computed)
    both = [name for name in ("x", "shift", "repeat") if name in first.coords]
    shared = {name: np.intersect1d(first[name], larger[name]) for name in both}
    xarray.testing.assert_equal(larger.sel(shared), first.sel(shared))
    xarray.testing.assert_equal(swept(**more, path=None), larger)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_finished_survives_an_interruption(swept, computed, monkeypatch, tmp_path, error):
    monkeypatch.setattr(random.Random, "shuffle", lambda self, ordered: None)
    logged = _sweep._run_chunk

    def interrupted(*arguments, **settings):
        if len(computed) == 2 * SIZE:
            raise error
        return logged(*arguments, **settings)

    with monkeypatch.context() as context:
        context.setattr(_sweep, "_run_chunk", interrupted)
        with pytest.raises(error) as ended:
            swept()
    said = f"10 of 24 cells are saved in {tmp_path / 'sweep'}: the same call continues from there"
    assert getattr(ended.value, "__notes__", []) == ([said] if error is KeyboardInterrupt else [])
    before = set(computed)
    computed.clear()
    resumed = swept()
    assert len(computed) == 14
    assert not before & set(computed)
    xarray.testing.assert_equal(resumed, swept(path=None))


def test_without_a_folder_an_interruption_says_that_nothing_is_kept(swept, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(_sweep, "_run_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt) as ended:
        swept(path=None)
    assert "no cells are saved: with path=PATH" in ended.value.__notes__[0]


def test_progress_counts_what_was_found(swept, capsys):
    swept(traced={"x": XS[:2]})
    assert capsys.readouterr().err == ""  # No terminal.
    swept(progress=True)
    said = capsys.readouterr().err
    assert re.search(r"24\.0/24\.0 .* cells/s", said)
    plan = (
        r"sweep: 2 choices of static parameters, 24 cells \(16 of them found in .*\), 5 at a time"
    )
    assert re.search(plan, said)


def test_a_terminal_shows_a_bar_by_itself(swept, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    swept(path=None, static={"shift": [0]})
    said = capsys.readouterr().err
    assert "sweep: 1 choice of static parameters, 12 cells, 5 at a time\n" in said
    assert "12.0/12.0" in said
    monkeypatch.setattr(_progress.importlib.util, "find_spec", lambda name: None)
    swept(path=None)
    assert capsys.readouterr().err == ""


OTHERS = {
    "key": {"key": jax.random.key(1)},
    "function": {"function": lambda key, x, shift: jax.random.uniform(key) * x},
    "function ": {"function": lambda key, x, shift: jax.random.uniform(key, (3,)) * x},
    "traced": {"traced": {"x": [1, 2]}},
    "chunk size": {"chunk_size": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_sweep_is_refused_by_name(swept, name, tmp_path):
    swept()
    before = {file.name: file.read_bytes() for file in (tmp_path / "sweep").iterdir()}
    with pytest.raises(
        ValueError, match=rf"sweep .* belongs to another run, with a different .*{name.strip()}"
    ):
        swept(**OTHERS[name])
    assert {file.name: file.read_bytes() for file in (tmp_path / "sweep").iterdir()} == before


def test_what_a_function_closes_over_counts(swept):
    public = np.zeros(3, np.float32)
    function = lambda key, x, shift: jax.random.uniform(key) + public.sum() + x  # noqa: E731
    swept(function=function)
    public[1] = 1
    with pytest.raises(
        ValueError, match=r"with a different function at shift=\d: name another folder"
    ):
        swept(function=function)


def test_rules_for_vmap_do_not_count(swept):
    """A chunk runs the function itself."""
    factor = [4.0]

    @jax.custom_batching.custom_vmap
    def scaled(x):
        return 2 * x

    @scaled.def_vmap
    def rule(size, batched, x):
        return factor[0] * x, True

    function = lambda key, x, shift: scaled(x)  # noqa: E731
    for settings in ({}, {}, {"path": None}):
        assert swept(function=function, **settings).value.values[0, 0, 0] == 1.0
        factor[0] *= 2


def test_choices_that_are_not_asked_for_must_be_of_the_same_key(swept, keys):
    swept(static={"shift": [5]})
    with pytest.raises(ValueError, match="with a different key: name another folder"):
        swept(key=keys(1))
    swept(function=lambda key, x, shift: x)  # Nobody knows what it was at 5.
    with pytest.raises(ValueError, match=r"with a different function at shift=\d"):
        swept()


def test_programs_that_were_compiled_otherwise_are_refused(swept, monkeypatch):
    swept()
    with monkeypatch.context() as context:
        context.setattr(jax, "__version__", "0.1")
        with pytest.raises(ValueError, match="with a different versions"):
            swept()
    with jax.disable_jit(), pytest.raises(ValueError, match="with a different compiler flags"):
        swept()
    with monkeypatch.context() as context:
        context.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        with pytest.raises(ValueError, match="with a different compiler flags"):
            swept()
    monkeypatch.setattr(_devices, "_processor", lambda: "another")
    with pytest.raises(ValueError, match="with a different processor"):
        swept()


@pytest.mark.parametrize("change", ["short", "flipped", "other", "empty"])
def test_a_damaged_chunk_is_refused_and_kept(swept, tmp_path, change):
    swept()
    file = next((tmp_path / "sweep").glob("*.chunk"))
    data = bytearray(file.read_bytes())
    data[-3] ^= change == "flipped"
    changed = {"short": data[:-1], "flipped": data, "other": b"something", "empty": b""}[change]
    file.write_bytes(changed)
    message = {"short": "is truncated", "flipped": "is corrupted"}.get(change, "is not a chunk")
    with pytest.raises(ValueError, match=rf"chunk .*{file.name} {message}"):
        swept()
    assert file.read_bytes() == changed
    file.unlink()
    xarray.testing.assert_equal(swept(), swept(path=None))


@pytest.mark.parametrize("place", range(30, 400, 37))
def test_what_a_chunk_says_of_itself_is_under_its_hash(swept, tmp_path, place):
    swept()
    file = next((tmp_path / "sweep").glob("*.chunk"))
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is corrupted"):
        swept()


def test_a_forged_chunk_makes_no_objects_of_bytes(tmp_path):
    """Its hash is right: the header of a file that somebody sends may hold anything."""
    body = b"A" * 16
    header = {"run": {}, "arrays": [["object", [2]]], "bytes": len(body)}
    sealed = {**header, "sha256": _chunk_files._sha256(header, [memoryview(body)])}
    forged = _chunk_files._magic("chunk") + json.dumps(sealed).encode() + b"\n" + body
    (tmp_path / "forged.chunk").write_bytes(forged)
    with pytest.raises(ValueError, match="is corrupted"):
        _chunk_files.read_chunk(tmp_path / "forged.chunk", "chunk")


def names(folder, pattern):
    return sorted(file.stem for file in folder.glob(pattern))


@pytest.fixture
def impatient(monkeypatch):
    """No pause, and an end where nothing would ever come."""
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        assert len(pauses) < 1000

    monkeypatch.setattr(_sweep.time, "sleep", pause)
    return pauses


def test_a_chunk_that_another_process_computes_is_awaited(swept, computed, impatient, tmp_path):
    """The lock of a file that is opened twice excludes, also within a process."""
    expected = swept(path=tmp_path / "alone")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "alone").glob("*.chunk")}
    (tmp_path / "sweep").mkdir()
    taken = dict(list(whole.items())[:2])
    others = []
    for name in taken:
        claim = (tmp_path / "sweep" / name).with_suffix(".claim")
        others.append(open(claim, "ab"))  # noqa: SIM115
        assert _durable.try_lock(others[-1])
    computed.clear()

    def arrive(seconds):
        impatient.append(seconds)
        assert names(tmp_path / "sweep", "*.chunk") == sorted(
            name.removesuffix(".chunk") for name in set(whole) - set(taken) | arrived
        )
        name, data = taken.popitem()
        arrived.add(name)
        (tmp_path / "sweep" / name).write_bytes(data)

    arrived = set()
    _sweep.time.sleep = arrive  # The fixture puts it back.
    found = swept()
    xarray.testing.assert_equal(found, expected)
    assert found.attrs["cells_computed"] == len(computed) < 24
    assert found.attrs["cells_found"] == 24 - len(computed)
    assert len(impatient) == 2
    for other in others:
        other.close()


def test_the_chunk_of_a_dead_process_is_taken_over(swept, computed, impatient, tmp_path):
    """Its claim stays on disk, and its lock is gone. A living one is waited for until it dies."""
    expected = swept(path=tmp_path / "alone")
    (tmp_path / "sweep").mkdir()
    for name in names(tmp_path / "alone", "*.chunk"):
        (tmp_path / "sweep" / f"{name}.claim").touch()
    dying = open(tmp_path / "sweep" / f"{name}.claim", "ab")  # noqa: SIM115
    assert _durable.try_lock(dying)
    _sweep.time.sleep = lambda seconds: dying.close()
    computed.clear()
    xarray.testing.assert_equal(swept(), expected)
    assert len(computed) == 24
    assert names(tmp_path / "sweep", "*.claim") == []


def test_processes_at_work_must_agree_and_those_that_ended_need_not(swept, keys, tmp_path):
    """Before the first chunk, too: what nobody works on any more may begin anew."""
    (tmp_path / "sweep").mkdir()
    with _store.Store(tmp_path / "sweep").in_use() as other:
        with other.agreement():
            other.say("ab", {"chunk size": 7, "key": "another"})
        with pytest.raises(ValueError, match=r"with a different .*key"):
            swept()
        assert names(tmp_path / "sweep", "*.chunk") == []
    assert swept().attrs["cells_computed"] == 24


def test_the_chunk_size_is_that_of_the_process_that_came_first(swept, tmp_path):
    with _store.Store(tmp_path / "sweep").in_use() as other:
        with other.agreement():
            pass
        swept(chunk_size=3)
        chunks = names(tmp_path / "sweep", "*.chunk")
        for file in (tmp_path / "sweep").glob("*.chunk"):
            file.unlink()
        swept(chunk_size=None)
    assert names(tmp_path / "sweep", "*.chunk") == chunks


def test_a_failure_frees_what_was_claimed(swept, monkeypatch):
    compute = _sweep._run_chunk
    with monkeypatch.context() as context:
        context.setattr(_sweep, "_run_chunk", lambda *arguments, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            swept()
    assert _sweep._run_chunk is compute
    assert swept().attrs["cells_computed"] == 24


def test_without_locks_every_process_does_all_and_nothing_breaks(swept, monkeypatch, tmp_path):
    expected = swept(path=tmp_path / "alone")
    monkeypatch.setattr(_durable, "fcntl", None)
    with _store.Store(tmp_path / "sweep").in_use() as other, other.agreement():
        xarray.testing.assert_equal(swept(), expected)


def test_a_file_that_was_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    """Another process that starts takes a new file for one that a dead process left."""
    lock, removed = _durable._lock, []

    def late(file):
        if not removed:
            removed.append(os.unlink(file.name))
        lock(file)

    monkeypatch.setattr(_durable, "_lock", late)
    with contextlib.suppress(FileNotFoundError):
        _durable.replace(tmp_path / "file", [b"some"])
    assert (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"some"


def test_chunks_of_two_runs_are_one_sweep(swept, tmp_path):
    """Where there are no locks: what overlaps has the same bits."""
    swept(traced={"x": XS[:2]}, path=tmp_path / "a")
    swept(traced={"x": XS[1:]}, path=tmp_path / "b")
    for file in (tmp_path / "b").glob("*.chunk"):
        file.rename(tmp_path / "a" / file.name)
    found = swept(path=tmp_path / "a")
    assert found.attrs["cells_computed"] == 0
    xarray.testing.assert_equal(found, swept(path=None))


def test_a_file_is_no_folder(swept, tmp_path):
    (tmp_path / "file").write_text("something")
    with pytest.raises(ValueError, match="must be a folder, got a file"):
        swept(path=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


def test_only_the_folder_itself_must_be_writable(swept, tmp_path, monkeypatch):
    """Root may write anywhere, so the system is asked in a test's name."""
    (tmp_path / "sweep").mkdir()
    closed = {tmp_path}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in closed)
    assert swept().attrs["cells_computed"] == 24
    closed.add(tmp_path / "sweep")
    with pytest.raises(ValueError, match="must be in a folder that exists"):
        swept()


def test_no_word_of_a_secure_key_is_on_disk(swept, tmp_path):
    key = dpjax.random.secure_key()
    swept(key=key)
    words = np.asarray(jax.random.key_data(key))
    for file in (tmp_path / "sweep").iterdir():
        data = file.read_bytes()
        for word in words:
            forms = (word.astype("<u4").tobytes(), word.astype(">u4").tobytes())
            assert not any(form in data for form in forms)
            assert f"{word}".encode() not in data
            assert f"{word:08x}".encode() not in data


def test_every_chunk_is_written_synced_and_renamed(swept, tmp_path, monkeypatch):
    order = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("sync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    swept()
    assert order == ["sync"] + (2 + 6) * ["sync", "rename", "sync"]  # Two runs, six chunks.
    left = tmp_path / "sweep" / f"ab12.chunk.{_durable._host()}.7.partial"
    left.write_bytes(b"some")
    swept()
    assert not left.exists()


PLACE = """
import jax, numpy as np, dpjax
def function(key, x, n):
    return jax.numpy.sin(jax.random.normal(key, (n,)) * x).sum()
found = dpjax.sweep(
    jax.random.key(0), function, traced={"x": [0.5, 1.0]}, static={"n": [100, 200, 300]},
    repeats=64, chunk_size=4, path=path,
)
answer((found.value.values.tobytes(), found.attrs["cells_computed"]))
"""


@pytest.mark.slow
def test_processes_that_share_a_folder_share_the_sweep(tmp_path, fork_python):
    """One of four is killed: the others do all of the rest, with the bits of a process alone."""
    expected, computed = fork_python(PLACE, path=str(tmp_path / "alone"))[1]()
    assert computed == 384
    started = [fork_python(PLACE, path=str(tmp_path / "shared")) for _ in range(4)]
    process, _ = started[0]
    while not names(tmp_path / "shared", "*.chunk"):
        time.sleep(0.01)
    process.kill()
    process.join()
    answers = [answered() for _, answered in started[1:]]
    assert {bits for bits, _ in answers} == {expected}
    assert 0 < sum(computed for _, computed in answers) <= 384  # Nothing is computed twice.
    assert names(tmp_path / "shared", "*.run") == []


RUN = """
import hashlib
import jax, jax.numpy as jnp, dpjax
def function(key, x, n):
    value = jnp.sin(jax.random.normal(key, (200,)) * x)
    return {"sum": value.sum(), "first": value[:n]}
found = dpjax.sweep(
    jax.random.key(0), function, traced={"x": [0.5, 1.0, 2.0]}, static={"n": {"a": 1, "b": 1}},
    repeats=500, chunk_size=50, path=path,
)
bits = hashlib.sha256(found["sum"].values.tobytes() + found["first"].values.tobytes())
answer((bits.hexdigest(), found.attrs["cells_computed"], found.attrs["cells_found"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 50])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, kills, fork_python):
    """Not before the first chunk: the cells take no time, so that most kills meet a file."""
    random = np.random.default_rng(0)

    def start(folder):
        """Until there is a new chunk, or all are done."""
        before = set(folder.glob("*.chunk*"))
        process, answered = fork_python(RUN, path=str(folder))
        answer = None
        while answer is None and before == set(folder.glob("*.chunk*")):
            answer = answered(0.002)
        return process, lambda seconds=600: answer or answered(seconds)

    _, answered = start(tmp_path / "whole")
    begun = time.monotonic()
    expected, computed, found = answered()
    assert (computed, found) == (3000, 0)
    duration = time.monotonic() - begun
    killed, went_on, folder = 0, 0, tmp_path / "0"
    while killed < kills:
        process, answered = start(folder)
        ended = answered(random.uniform(0, duration)) is not None
        process.kill()
        process.join()
        killed += not ended
        # The machine may be busier by now, or have less to do.
        duration *= 0.8 if ended else 1.05
        if ended or killed == kills or random.uniform() < 0.2:
            bits, computed, found = start(folder)[1]()
            assert bits == expected
            assert computed + found == 3000
            went_on += 0 < found < 3000
            folder = tmp_path / f"{killed} {time.monotonic()}"
    assert went_on or kills < 10
