"""Many devices and many hosts: the same bits as on one, and no target that hangs."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._running._devices import Layout

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import jax, jax.numpy as jnp, numpy as np, dpjax
from jax.sharding import AxisType, Mesh
key = jax.random.key(0)
def oracle(key, n):
    return jax.random.normal(key, (n,))
def sample(mesh=None, **settings):
    settings = {"n": 50, "norm": "l1", "m": 1000, "gamma": 0.05, "chunk_size": 64, **settings}
    return dpjax.sample_sensitivity(key, jnp.mean, oracle, mesh=mesh, **settings).value
def distances(mesh=None):
    return np.asarray(dpjax.sample_distances(
        key, jnp.mean, oracle, n=50, norm="l1", m=1000, chunk_size=64, mesh=mesh))
"""


# What fast tests run, in one process.
PROGRAMS = {
    "mesh": SETUP
    + """
auto, explicit = AxisType.Auto, AxisType.Explicit
meshes = [
    jax.make_mesh((8,), ("devices",)),
    jax.make_mesh((2, 4), ("hosts", "devices"), axis_types=(explicit, auto)),
    jax.make_mesh((3,), ("some",), devices=jax.devices()[2:5]),
    jax.make_mesh((1,), ("one",), devices=jax.devices()[5:6]),
]
value, expected = sample(), distances()
for mesh in meshes:
    assert sample(mesh) == value, mesh
    np.testing.assert_array_equal(distances(mesh), expected, str(mesh))
with jax.set_mesh(meshes[0]):
    assert sample() == sample(meshes[1]) == value
inside = jax.jit(lambda: dpjax.sample_distances(
    key, jnp.mean, oracle, n=50, norm="l1", m=1000, chunk_size=64, mesh=meshes[1]))()
np.testing.assert_allclose(inside, expected, rtol=1e-3)
each = [sample(mesh, n=3, m=100, positions="each", gamma=0.2) for mesh in (None, meshes[2])]
assert each[0] == each[1]

key, every = jax.device_put(key, jax.devices()[3]), Mesh(jax.devices(), ("x",))
for mesh in (meshes[3], every):
    assert sample(mesh) == value
    with jax.set_mesh(every):
        assert sample(mesh) == value
np.testing.assert_array_equal(distances(meshes[3]), expected)

with jax.set_mesh(every):
    key = jax.random.key(0)
    assert len(key.devices()) == 8
    assert sample() == sample(meshes[3]) == value
assert sample() == value
""",
    "selection": SETUP
    + """
import functools, re
from dpjax.sensitivity._chunks import _compiled_selection, empty_block
from dpjax._running._devices import Layout, row_of
layout = Layout(tuple(jax.devices()), 10**5, 64)
block = empty_block(layout, {}, np.float32)
selection = _compiled_selection.lower(block, np.uint32(5), mesh=row_of(layout.devices))
text = selection.compile().as_text()
moved = re.findall(r"= (.*) (all-gather|all-to-all|collective-permute|all-reduce)[.(-]", text)
assert {kind for _, kind in moved} == {"all-reduce"}, moved
assert all(shape.split("{")[0] in ("u32[]", "f32[]") for shape, _ in moved), moved
""",
}


@pytest.fixture(scope="module")
def failures(failures_of):
    return failures_of(PROGRAMS, devices=8)


def test_the_same_bits_on_any_mesh_with_a_key_on_any_device(failures):
    assert not failures.get("mesh"), failures["mesh"]


def test_selection_never_gathers_the_distances(failures):
    assert not failures.get("selection"), failures["selection"]


@pytest.mark.slow
def test_batched_lapack_calls_do_not_hang(run_python):
    """Ridge by `solve`, 64 fits to a chunk, on eight devices that share the threads of a CPU."""
    run_python(
        """
import jax, jax.numpy as jnp, dpjax
def ridge(database):
    x, y = database["x"], database["y"]
    return jnp.linalg.solve(x.T @ x / 300 + 0.1 * jnp.eye(32), x.T @ y / 300)
def oracle(key, n):
    features, responses = jax.random.split(key)
    return {"x": jax.random.normal(features, (n, 32)), "y": jax.random.normal(responses, (n,))}
for mesh in (jax.make_mesh((8,), ("devices",)), jax.make_mesh((2,), ("devices",))):
    dpjax.sample_sensitivity(jax.random.key(0), ridge, oracle, n=300, norm="l2", m=1024,
                             gamma=0.05, chunk_size=64, mesh=mesh)
""",
        timeout=600,
        devices=8,
    )


@pytest.mark.parametrize(
    ("m", "size", "devices"), [(1000, 64, 8), (5, 2, 4), (7, 7, 3), (64, 1, 5)]
)
def test_every_chunk_has_one_device(m, size, devices):
    layout = Layout((None,) * devices, m, size)
    assert [c for d in range(devices) for c in layout.chunks_of(d)] == list(range(layout.chunks))
    assert (layout.chunks - 1) * size < m <= layout.chunks * size


def test_a_mesh_is_a_mesh(key, uniform):
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got 8"):
        dpjax.sample_sensitivity(key, jnp.max, uniform, n=2, norm="l1", m=9, mesh=8)


HOST = (
    """
import os, sys, threading
import jax
process, count, port, heartbeat = map(int, sys.argv[1:5])
jax.distributed.initialize(
    f"127.0.0.1:{port}", count, process, heartbeat_timeout_seconds=heartbeat)
"""
    + SETUP
    + """
mesh = jax.make_mesh((jax.device_count(),), ("devices",))
"""
)


@pytest.fixture(scope="module")
def on_hosts(environment):
    """Runs a program as several processes on loopback: return codes and what they print.

    One that gives no sign of life for `heartbeat` seconds is taken for dead, also if it is starved.
    """

    def run(code, count, *, heartbeat=100, **variables):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", HOST + code, *map(str, (i, count, port, heartbeat))],
                env=environment(**variables),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]
        try:
            finished = [process.communicate(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [process.returncode for process in processes], finished

    return run


VALUES = "print('VALUES', sample(mesh, checkpoint={path!r}), sample())"


def assert_same(codes, finished, folder):
    """Compared in one process: another one's programs may be compiled otherwise."""
    assert not any(codes), finished
    printed = {line for out, _ in finished for line in out.splitlines() if "VALUES" in line}
    (together, alone) = printed.pop().split()[1:]
    assert together == alone
    assert not printed  # All processes return the same.
    assert len(list(folder.iterdir())) == len(codes)  # Each has a file.


@pytest.mark.slow
def test_the_same_bits_on_hosts_of_several_devices(tmp_path, on_hosts):
    codes, finished = on_hosts(VALUES.format(path=str(tmp_path / "run")), 4, devices=2)
    assert_same(codes, finished, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "key = jax.random.key(process)",
        "os.environ['XLA_FLAGS'] = f'--xla_backend_optimization_level={process}'",
    ],
    ids=["key", "compiler"],
)
def test_processes_that_differ_are_told(code, on_hosts):
    codes, finished = on_hosts(f"{code}; sample(mesh)", 2)
    assert 0 not in codes
    assert all("processes must make the same call" in err for _, err in finished), finished


FAILURES = """
bad = process == 1
def untraceable(database):
    if bad:
        raise KeyboardInterrupt
    return jnp.mean(database)
def no_oracle(key, n):
    if bad:
        raise KeyError("no oracle here")
    return oracle(key, n)
def broken(database):
    if bad:
        raise ValueError("only here")
    return float(np.mean(database))
host = dpjax.targets.host(broken, output=jnp.zeros(()), version="1")
settings = {"n": 50, "norm": "l1", "m": 100}
calls = {
    "size": lambda: sample(mesh, n=-1 if bad else 50),
    "mesh": lambda: distances(8 if bad else mesh),
    "checkpoint": lambda: sample(mesh, checkpoint="/nowhere/run" if bad else None),
    "interruption": lambda: dpjax.sample_sensitivity(
        key, untraceable, oracle, mesh=mesh, **settings),
    "oracle": lambda: dpjax.sample_distances(key, jnp.mean, no_oracle, mesh=mesh, **settings),
    "host": lambda: dpjax.sample_distances(key, host, oracle, mesh=mesh, **settings),
    "key": lambda: dpjax.sample_distances(
        jax.random.key(process), jnp.mean, oracle, mesh=mesh, **settings),
}
for name, call in calls.items():
    try:
        call()
    except BaseException as error:
        print("FAILED", name, type(error).__name__, error, sep="|")
print("VALUES", sample(mesh, checkpoint="CHECKPOINT"), sample())
if bad:
    sys.exit()
try:
    sample(mesh)
except RuntimeError as error:
    print("ENDED", error)
"""


def _failures(printed):
    rows = [line.split("|", 3) for line in printed.splitlines() if line.startswith("FAILED")]
    return {name: (kind, text) for _, name, kind, text in rows}


@pytest.fixture(scope="module")
def two_hosts(on_hosts, tmp_path_factory):
    """What two processes print, and the folder of their checkpoints; they take seconds to start."""
    folder = tmp_path_factory.mktemp("hosts")
    return *on_hosts(FAILURES.replace("CHECKPOINT", str(folder / "run")), 2), folder


def test_the_same_bits_on_many_hosts(two_hosts):
    assert_same(*two_hosts)


def test_an_error_in_one_process_is_told_to_all(two_hosts):
    """A collective would wait for it for minutes, and then abort the process.

    Whatever ends a call on one process only: a check of its arguments, a file, what it is given as
    a mesh, an interruption, an oracle, code on the host; or no call at all. Collectives run after
    the probes and the pairs, so nothing but a kill comes between them and the last meeting.
    """
    codes, ((there, _), (here, _)), _ = two_hosts
    assert codes == [0, 0]
    said, told = map(_failures, (here, there))
    assert list(said) == list(told)
    assert {name: kind for name, (kind, _) in said.items()} == {
        "size": "ValueError",
        "mesh": "TypeError",
        "checkpoint": "ValueError",
        "interruption": "KeyboardInterrupt",
        "oracle": "KeyError",
        "host": "RuntimeError",
        "key": "ValueError",
    }
    for name, (_, text) in told.items():
        if name == "key":
            assert "processes must make the same call" in text
        else:
            own = f"{said[name][0]}: {said[name][1]}".rstrip(": ")
            assert text == f"process 1 of the call failed: {own}"
    values = {line for out in (here, there) for line in out.splitlines() if "VALUES" in line}
    assert len(values) == 1  # Nobody is out of step.
    assert "ENDED process 1 has ended without making this call" in there


@pytest.mark.slow
def test_a_process_that_dies_is_an_error(on_hosts):
    """The other one ends too, once no sign of life has come for its heartbeat's timeout."""
    code = "os._exit(7) if process == 1 else sample(mesh)"
    codes, finished = on_hosts(code, 2, heartbeat=10)
    assert codes[1] == 7
    assert codes[0] not in (0, None)
    assert finished[0][1]


@pytest.mark.slow
def test_closed_over_data_is_on_every_device(run_python):
    run_python(
        SETUP
        + """
public = jnp.asarray(np.random.default_rng(0).normal(size=40).astype(np.float32))
def resampled(key, n):
    return public[jax.random.randint(key, (n,), 0, 40)]
values = [dpjax.sample_sensitivity(key, jnp.mean, resampled, n=50, norm="l1", m=500, gamma=0.05,
          chunk_size=32, mesh=mesh).value for mesh in (None, jax.make_mesh((8,), ("d",)))]
assert values[0] == values[1]
""",
        devices=8,
    )


def test_float64_distances_keep_their_dtype(key, x64):
    distances = dpjax.sample_distances(
        key, jnp.mean, lambda key, n: jax.random.normal(key, (n,)), n=5, norm="l1", m=10
    )
    assert distances.dtype == np.float64
