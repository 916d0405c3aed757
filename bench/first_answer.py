"""The first answer: whole processes in turns, against the same jobs in plain JAX.

Plain JAX draws with threefry keys and adds noise in floats, which is not private.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

N, GAMMA, M, K = 1000, 0.05, 900, 871
WARM_CALLS = 300


def readme_in_dpjax() -> None:
    """The README's first example."""
    import jax
    import jax.numpy as jnp

    import dpjax

    def oracle(key: jax.Array, n: int) -> jax.Array:
        return jax.random.exponential(key, (n,))

    key = dpjax.random.secure_key()
    key_sample, key_release, key_data = jax.random.split(key, 3)
    database = oracle(key_data, N)
    sensitivity = dpjax.sample_sensitivity(
        key_sample, jnp.mean, oracle, n=N, norm="l1", gamma=GAMMA
    )
    assert (sensitivity.m, sensitivity.k) == (M, K)
    private_mean = dpjax.privatize(jnp.mean, dpjax.laplace(sensitivity, epsilon=1.0))
    assert abs(private_mean(key_release, database).value - 1) < 1


def readme_in_jax() -> None:
    """The same number of pairs, the same order statistic, and noise in floats."""
    import jax
    import jax.numpy as jnp

    def oracle(key: jax.Array, n: int) -> jax.Array:
        return jax.random.exponential(key, (n,))

    @jax.jit
    def sensitivity(key: jax.Array) -> jax.Array:
        def distance(key: jax.Array) -> jax.Array:
            records = oracle(key, N + 1)
            return jnp.abs(jnp.mean(records[:N]) - jnp.mean(records.at[N - 1].set(records[N])[:N]))

        distances = jax.lax.map(distance, jax.random.split(key, M), batch_size=256)
        return jnp.sort(distances)[K - 1]

    key_sample, key_release, key_data = jax.random.split(jax.random.key(0), 3)
    database = oracle(key_data, N)
    scale = sensitivity(key_sample)
    released = jnp.mean(database) + scale * jax.random.laplace(key_release)
    assert abs(released - 1) < 1


def steps_in_dpjax() -> dict[str, Callable[[], Any]]:
    """What a program does one after the other, from its first key on."""
    import dataclasses

    import jax
    import numpy as np

    import dpjax

    key = dpjax.random.secure_key()
    first = dpjax.assume_sensitivity(1.0, norm="l1", n=N)
    other = dataclasses.replace(
        first, value=2.0, gamma=GAMMA, confidence=0.99, m=M, k=K, identity="other"
    )
    scalar, vector, matrix = (np.zeros(shape, np.float32) for shape in ((), (5,), (2, 6)))
    mechanism = dpjax.laplace(first, 1.0)
    return {
        "split": lambda: jax.random.split(key, 3),
        "release": lambda: mechanism(key, scalar).value,
        "release of a vector": lambda: mechanism(key, vector).value,
        "release of another shape": lambda: mechanism(key, matrix).value,
        "release at another epsilon, sensitivity, gamma, m and k": lambda: (
            dpjax.laplace(other, 2.0)(key, scalar).value
        ),
    }


def steps_in_jax() -> dict[str, Callable[[], Any]]:
    """The same steps."""
    import jax
    import numpy as np

    key = jax.random.key(0)
    scalar, vector, matrix = (np.zeros(shape, np.float32) for shape in ((), (5,), (2, 6)))
    return {
        "split": lambda: jax.random.split(key, 3),
        "release": lambda: scalar + 1.0 * jax.random.laplace(key),
        "release of a vector": lambda: vector + 1.0 * jax.random.laplace(key, vector.shape),
        "release of another shape": lambda: matrix + 1.0 * jax.random.laplace(key, matrix.shape),
        "release at another epsilon, sensitivity, gamma, m and k": lambda: (
            scalar + 2.0 * jax.random.laplace(key)
        ),
    }


def timed(steps: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Seconds of every step the first time and, for the first two, warm; and what was compiled."""
    import jax

    compiled = 0

    def count(event: str, *_: Any, **__: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.block_until_ready(jax.numpy.zeros(3) + 1)  # The backend starts.
    seconds, compilations = {}, {}
    for name, step in steps.items():
        before, start = compiled, time.perf_counter()
        jax.block_until_ready(step())
        seconds[f"first {name}"] = time.perf_counter() - start
        compilations[name] = compiled - before
    for name in ("split", "release"):
        calls = []
        for _ in range(WARM_CALLS):
            start = time.perf_counter()
            jax.block_until_ready(steps[name]())
            calls.append(time.perf_counter() - start)
        seconds[f"warm {name}"] = statistics.median(calls)
    return {"seconds": seconds, "compilations": compilations}


CHILDREN = {
    "readme dpjax": readme_in_dpjax,
    "readme jax": readme_in_jax,
    "steps dpjax": lambda: print(json.dumps(timed(steps_in_dpjax()))),
    "steps jax": lambda: print(json.dumps(timed(steps_in_jax()))),
}


def process(job: str, program: str = __file__, **environment: str) -> tuple[float, float, int, str]:
    """Runs one of them in a process of its own: seconds, those of its CPUs, MiB, its output."""
    root = pathlib.Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    environment.pop("XLA_FLAGS", None)
    # Installed packages have byte code. Without it, every process would compile dpjax's source.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, program, job], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0, job
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit >> 20, output


def run(rounds: int = 5) -> None:
    """All of them in turns: medians."""
    measured: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    compilations = {}

    def note(name: str, seconds: float) -> None:
        measured.setdefault(name, []).append(seconds)

    with tempfile.TemporaryDirectory() as cache:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        process("readme dpjax", **kept)
        for _ in range(rounds):
            for name, job, environment in (
                ("readme dpjax", "readme dpjax", {}),
                ("readme jax", "readme jax", {}),
                ("readme dpjax, cache", "readme dpjax", kept),
            ):
                seconds, cpu, memory[name], _ = process(job, **environment)
                note(name, seconds)
                note(f"{name}: CPU", cpu)
            for side in ("dpjax", "jax"):
                *_, output = process(f"steps {side}")
                found = json.loads(output)
                compilations[side] = found["compilations"]
                for name, seconds in found["seconds"].items():
                    note(f"{name}: {side}", seconds)
    seconds = {name: statistics.median(times) for name, times in measured.items()}
    _record(seconds, memory, compilations, rounds)


def _record(
    seconds: dict[str, float], memory: dict[str, int], compilations: Any, rounds: int
) -> None:
    from harness import Row, record

    peer = "plain JAX (not private)"
    readme, plain = seconds["readme dpjax"], seconds["readme jax"]
    example = "README example, whole process"
    rows = [
        Row(
            f"{example}, cold",
            peer,
            readme,
            plain,
            round(1 / 1.4, 2),
            "three programs of the sampler, one of keys and one of the release are compiled",
        ),
        Row(
            f"{example}, programs kept by JAX's persistent cache",
            f"{peer}, cold",
            seconds["readme dpjax, cache"],
            plain,
            1,
            "imports and tracing remain",
        ),
    ]
    rows += [
        Row(name.replace("warm", "warm eager"), peer, ours, seconds[f"{name}: jax"])
        for name, ours in (
            (name.removesuffix(": dpjax"), ours)
            for name, ours in seconds.items()
            if name.endswith(": dpjax")
        )
    ]
    race = SimpleNamespace(seconds=seconds, peak_mib=memory)
    sizes = {"n": N, "m": M, "k": K, "rounds": rounds}
    record("first answer", rows, race=race, sizes=sizes, results={"compilations": compilations})
    print("compilations:", compilations)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        CHILDREN[sys.argv[1]]()
    else:
        run()
