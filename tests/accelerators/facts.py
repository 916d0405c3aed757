"""What a compiled program holds: read from its optimized HLO, no device needed."""

import collections
import dataclasses
import re
import time
from typing import Any

import jax

# Instructions that XLA starts a kernel for, where they stand outside of fusions.
_LAUNCHED = frozenset(
    {"all-gather", "all-gather-start", "all-reduce", "all-reduce-start", "broadcast", "concatenate"}
    | {"convert", "convolution", "copy", "custom-call", "dot", "dynamic-slice", "fusion", "gather"}
    | {"dynamic-update-slice", "iota", "pad", "reduce", "reduce-window", "scatter", "select"}
    | {"slice", "sort", "transpose"}
)
# What computes nothing.
_MOVED = frozenset(
    {"bitcast", "bitcast-convert", "broadcast", "call", "conditional", "constant", "copy", "fusion"}
    | {"get-tuple-element", "parameter", "reshape", "slice", "tuple", "while"}
)
_CALLS_HOST = re.compile(
    r"callback|SendToHost|RecvFromHost|\b(?:infeed|outfeed)\(|is_host_transfer=true"
)
_NAME = r"%?[\w.\-]+"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Of one program on one accelerator.

    Attributes:
        compile_seconds: of this machine, so they differ from run to run.
        temporary: bytes of memory beside arguments and results.
        host: bytes of host memory.
        flops: operations.
        bytes: read and written.
        launches: kernels that one run starts; a loop of unknown length counts once. None, as the
            next three, if this jaxlib cannot read what a newer compiler wrote.
        loops: loops whose length depends on data, as often as they are entered.
        wide: arithmetic instructions on 64 bits.
        doubles: those on float64.
        calls_host: whether it calls or sends to the host.
    """

    compile_seconds: float
    temporary: int
    host: int
    flops: float
    bytes: float
    launches: int | None
    loops: int | None
    wide: int | None
    doubles: int | None
    calls_host: bool


def facts_of(lowered: Any) -> Facts:
    """Compiles a program ahead of time and reads it."""
    return compiled_facts(lowered)[1]


def compiled_facts(lowered: Any) -> tuple[Any, Facts]:
    """The compiled program, which can be called where its devices are, and its facts."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), _cost(compiled)
    counts = dict.fromkeys(("launches", "loops", "wide", "doubles"))
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if "RET_CHECK" not in str(error):
            raise
        text = lowered.as_text()
    else:
        parts, entry = _computations(text)
        launches, loops = _started(parts, entry, 1)
        wide = [x for part in parts.values() for x in part if x.is_wide]
        doubles = sum("f64" in x.type for x in wide)
        counts = {"launches": launches, "loops": loops, "wide": len(wide), "doubles": doubles}
    return compiled, Facts(
        compile_seconds=seconds,
        temporary=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        flops=cost.get("flops", 0.0),
        bytes=cost.get("bytes accessed", 0.0),
        **counts,
        calls_host=bool(_CALLS_HOST.search(text)),
    )


def _cost(compiled: Any) -> dict[str, float]:
    """XLA's count; a program for a GPU has none without a GPU, so the client of the CPU counts."""
    if found := compiled.cost_analysis():
        return found
    from jaxlib import _jax

    client = jax.local_devices(backend="cpu")[0].client
    return _jax.hlo_module_cost_analysis(client, compiled.runtime_executable().hlo_modules()[0])


@dataclasses.dataclass(frozen=True)
class _Instruction:
    type: str
    operation: str
    line: str

    @property
    def is_wide(self) -> bool:
        return bool(re.search(r"\b[sfu]64\[", self.type)) and self.operation not in _MOVED

    @property
    def steps(self) -> int | None:
        """How often the body of a loop runs, if XLA knows."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.line)
        return int(found[1]) if found else None

    def named(self, role: str) -> str:
        found = re.search(rf"\b{role}=({_NAME})", self.line)
        assert found, self.line
        return found[1].lstrip("%")


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of every computation, and the name of the first."""
    parts: dict[str, list[_Instruction]] = collections.defaultdict(list)
    name, entry = "", ""
    for line in text.splitlines():
        bare = re.sub(r"/\*.*?\*/", "", line)
        if head := re.match(rf"(ENTRY )?({_NAME}) \(.*\{{$", bare):
            name = head[2].lstrip("%")
            entry = name if head[1] else entry
        elif found := re.match(rf"\s+(?:ROOT )?{_NAME} = (.*)$", bare):
            # Layouts hold parentheses: {0:T(256)}.
            short = re.sub(r"\{[^{}]*\}", "", found[1])
            if made := re.match(r"(\([^=]*?\)|\S+) ([a-z][a-z0-9-]*)\(", short):
                parts[name].append(_Instruction(made[1], made[2], found[1]))
    return parts, entry


def _started(parts: dict[str, list[_Instruction]], name: str, times: int) -> tuple[int, int]:
    """Launches and loops of unknown length in a computation that runs so often."""
    launches = loops = 0
    for x in parts[name]:
        launches += times * (x.operation in _LAUNCHED)
        inner: list[tuple[str, int]] = []
        if x.operation == "while":
            loops += times * (x.steps is None)
            steps = times * (x.steps or 1)
            inner = [(x.named("body"), steps), (x.named("condition"), steps)]
        elif x.operation == "call":
            inner = [(x.named("to_apply"), times)]
        elif x.operation == "conditional" and (
            branches := re.search(r"branch_computations=\{(.*?)\}", x.line)
        ):
            inner = [(branch.strip().lstrip("%"), times) for branch in branches[1].split(",")]
        for computation, steps in inner:
            more = _started(parts, computation, steps)
            launches, loops = launches + more[0], loops + more[1]
    return launches, loops
