"""Checks a device and measures it: exact results, ceilings, the engine's programs, the main job.

`python bench/on_device.py` needs jax, numpy, scipy, optax and pytest, and no network. It takes
minutes on a GPU, appends to bench/results/NAME.jsonl, and renews docs/accelerators.md. The exit
status says whether all results were right. `--small` takes a minute on two cores of a CPU.
`--record` writes the bits that all devices must compute; run it on a CPU.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# The package need not be installed; tests/ has the programs and the mechanisms.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import ceilings  # noqa: E402
import dpjax  # noqa: E402
import mean  # noqa: E402
from accelerators import exactness, report  # noqa: E402
from accelerators.facts import compiled_facts  # noqa: E402
from accelerators.programs import Call, programs  # noqa: E402
from harness import RESULTS, Race, Row, device_name, machine, record  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        exact: numbers of a computation whose bits are compared.
        points: of an elementary function.
        removed: records that are taken out of a clipped sum.
        ceilings: floats that are copied, side of a matrix, random words.
        programs: names, or None for all that need one device.
        pairs: of the main job.
        numpy_pairs: of NumPy, scaled up.
        seconds: after which no further part begins.
    """

    exact: int
    points: int
    removed: int
    ceilings: tuple[int, int, int]
    programs: tuple[str, ...] | None
    pairs: tuple[int, ...]
    numpy_pairs: int
    seconds: float


FULL = Size(
    exact=2**20,
    points=10**6,
    removed=64,
    ceilings=(ceilings.COPIED, ceilings.SIDE, ceilings.WORDS),
    programs=None,
    pairs=(10**6, 10**7, 10**8),
    numpy_pairs=10**5,
    seconds=420,
)
SMALL = Size(
    exact=2**12,
    points=10**4,
    removed=4,
    ceilings=(2**16, 2**7, 2**16),
    programs=("Laplace, scalar", "chunk: density by sums", "probes: mean by sums"),
    pairs=(10**4,),
    numpy_pairs=10**3,
    seconds=600,
)


def main() -> int:
    """How many results are wrong, or parts failed."""
    options = _options()
    if options.record:
        exactness.record((SMALL.exact, FULL.exact))
        return 0
    size = SMALL if options.small else FULL
    print(f"{machine()}, jax {jax.__version__}", flush=True)
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("exactness", lambda: check_exactness(size)),
        ("elementary functions", lambda: check_elementary(size)),
        ("clipping", lambda: check_clipping(size)),
        ("ceilings", lambda: measure_ceilings(size)),
        *((f"mean, m = {m}", lambda m=m: measure_mean(m, size)) for m in size.pairs),
        *((name, lambda name=name: measure_program(name)) for name in _programs(size)),
    ]
    problems = _run(parts, size.seconds)
    if RESULTS == ROOT / "bench" / "results":
        report.write({})
    print(report.measured(RESULTS / f"{device_name()}.jsonl"))
    print(*(f"FAILED {problem}" for problem in problems), f"{len(problems)} failed", sep="\n")
    return len(problems)


def _run(parts: Sequence[tuple[str, Callable[[], list[str]]]], seconds: float) -> list[str]:
    """Runs parts in turn, and goes on after a failure."""
    problems, start = [], time.perf_counter()
    for name, part in parts:
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            problems.append(f"{name}: not begun after {elapsed:.0f} s")
            continue
        try:
            found = part()
        except Exception as error:
            traceback.print_exc()
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
        problems += [f"{name}: {problem}" for problem in found]
        print(f"{elapsed:5.0f} s  {name}: {'; '.join(found) or 'done'}", flush=True)
    return problems


def check_exactness(size: Size) -> list[str]:
    """Compares bits with those of a CPU, and says which numbers differ."""
    expected, found = exactness.recorded(size.exact), exactness.exact(size.exact)
    problems = [f"{name} has no recorded bits" for name in found.keys() - expected.keys()]
    seconds = {}
    for name, run in found.items():
        start = time.perf_counter()
        try:
            got = jax.device_get(run())
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        seconds[name] = time.perf_counter() - start
        if exactness.digest(got) != expected.get(name):
            problems.append(f"{name}: {_difference(run, got)}")
    equal = len(found) - len(problems)
    results = {"computations": len(found), "equal": equal, "problems": problems}
    _record("exactness", seconds, results)
    return problems


def _difference(run: Callable[[], Any], got: Any) -> str:
    """How the result of this device differs from that of the CPU of this machine."""
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.device_get(run())
    shown = []
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = np.atleast_1d(np.asarray(one)), np.atleast_1d(np.asarray(other))
        places = np.argwhere(~((one == other) | ((one != one) & (other != other))))
        if len(places):
            first = tuple(places[0])
            shown.append(f"{len(places)} of {one.size} differ, first {one[first]}, {other[first]}")
    return "; ".join(shown) or "the recorded bits differ, and those of this machine's CPU too"


def check_elementary(size: Size) -> list[str]:
    """Errors of elementary functions, which proofs count."""
    shares = exactness.elementary_errors(size.points, np.dtype(np.float32))
    with jax.enable_x64(True):
        wide = exactness.elementary_errors(size.points, np.dtype(np.float64))
    shares |= {f"{name}, float64": share for name, share in wide.items()}
    problems = [f"{name}: {share:.3g} of what is counted" for name, share in shares.items()]
    problems = [x for x, share in zip(problems, shares.values(), strict=True) if not share <= 1]
    _record("elementary functions", {}, {"largest": max(shares.values()), **shares})
    return problems


def check_clipping(size: Size) -> list[str]:
    """A record moves the clipped sum of a network no further than the noise assumes."""
    share = exactness.clipping_moves(size.removed)
    problems = [] if 0.9 < share <= 1 else [f"a record moves the sum by {share} of the bound"]
    _record("clipping", {}, {"largest": share})
    return problems


def measure_ceilings(size: Size) -> list[str]:
    """The rates of the card."""
    for name, rate in ceilings.measured(*size.ceilings).items():
        print(f"    {name}: {rate:.3g} per second")
    return []


def measure_mean(m: int, size: Size) -> list[str]:
    """The paper's main job, against NumPy on one core."""
    part = min(m, size.numpy_pairs)
    estimates: dict[str, float] = {}

    def noted(name: str, estimate: Callable[[], float]) -> Callable[[], None]:
        return lambda: estimates.update({name: estimate()})

    race = Race(
        {
            "summable": noted("summable", lambda: mean.in_dpjax(mean.MEAN, mean.INDEPENDENT, m)),
            "dense": noted("dense", lambda: mean.in_dpjax(jnp.mean, mean.oracle, m)),
            "numpy": noted("numpy", lambda: mean.in_numpy(part, threads=1)),
        },
        rounds=1,
    )
    peer = f"NumPy, one core ({part:,} pairs, scaled)"
    theirs = race.seconds["numpy"] * m / part
    ways = ("dense", "summable")
    job = f"mean, n = {mean.N}, m = 10^{len(str(m)) - 1}, {{}}, beside one core"
    record(
        "mean on a device",
        [Row(job.format(way), peer, race.seconds[way], theirs) for way in ways],
        race=race,
        sizes={"n": mean.N, "m": m, "m of NumPy": part},
        results=estimates,
        work={"bytes": 8.0 * m * mean.N, "flops": 2.0 * m * mean.N},
    )
    # Of 10^4 pairs, an estimate varies by 1%; of NumPy's 10^3, by 4%.
    alike = abs(estimates["summable"] / estimates["dense"] - 1) < 0.07
    near = abs(estimates["numpy"] / estimates["dense"] - 1) < 0.3
    return [] if alike and near else [f"estimates differ: {estimates}"]


def measure_program(name: str) -> list[str]:
    """Compiles a program, reads it, and runs it."""
    call = _programs()[name]()
    lowered = call.trace().lower()
    compiled, facts = compiled_facts(lowered)
    given = _Arguments(call)
    seconds = [_seconds(compiled, given) for _ in range(3)]
    rounds = min(50, int(0.5 / max(min(seconds), 1e-6)))
    seconds += [_seconds(compiled, given) for _ in range(rounds)]
    _record("program", {name: min(seconds)}, dataclasses.asdict(facts), sizes={"name": name})
    return []


def _seconds(compiled: Callable[..., Any], given: "_Arguments") -> float:
    """Of one run, once all that it is called with is there."""
    arguments = given.fresh()
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


class _Arguments:
    """What a program is called with; a donated array is made again."""

    def __init__(self, call: Call) -> None:
        self._specs = call.arguments
        self._made = jax.tree.map(_array, self._specs)

    def fresh(self) -> Any:
        again = lambda x, spec: _array(spec) if x.is_deleted() else x  # noqa: E731
        self._made = jax.tree.map(again, self._made, self._specs)
        return jax.block_until_ready(self._made)


def _array(spec: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
    """Random numbers, ones of words, keys: enough for a run that is timed."""
    if isinstance(spec, jax.Array):
        return spec
    dtype, key = spec.dtype, jax.random.key(1)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        (one,) = (x for x in (key, dpjax.random.seeded_key(0)) if x.dtype == dtype)
        made = jax.random.split(one, spec.shape) if spec.shape else one
    elif jnp.issubdtype(dtype, jnp.floating):
        made = jax.random.uniform(key, spec.shape, dtype)
    elif jnp.issubdtype(dtype, jnp.signedinteger):
        # Labels of few records, or one of as many buckets as records.
        most = spec.size if spec.size > 10**5 else 10
        made = jax.random.randint(key, spec.shape, 0, most, dtype)
    else:
        made = jnp.ones(spec.shape, dtype)
    return jax.device_put(made, spec.sharding)


def _programs(size: Size | None = None) -> dict[str, Callable[[], Call]]:
    found = programs(jax.devices()[:1] * 4)
    names = size.programs if size and size.programs else found
    return {name: found[name] for name in names if "4 devices" not in name}


def _record(
    job: str, seconds: dict[str, float], results: Any, *, sizes: dict[str, Any] | None = None
) -> None:
    race = Race({}, rounds=0)
    race.seconds |= seconds
    record(job, [], race=race, sizes=sizes or {}, results=results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a minute on a CPU")
    parser.add_argument("--record", action="store_true", help="writes the bits of this CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(min(main(), 1))
