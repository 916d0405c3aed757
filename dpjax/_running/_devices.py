"""Layout of work on devices: which device computes which chunks, memory, and compilation."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Collection, Container
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._version import __version__

P = ParamSpec("P")
T = TypeVar("T")

AXIS = "pairs"
Device = Any  # jax.Device, which type checkers do not know.

# Bytes of a chunk, by platform. On a CPU, chunks that fit into the cache are fastest. On an
# accelerator, only its memory limits the size.
_CHUNK_BYTES, _ACCELERATOR_CHUNK_BYTES = {"cpu": 2 * 2**20}, 256 * 2**20
_SHARE = 1 / 4  # Two chunks are in flight, and the caller needs memory for its own arrays.
_CONTAINER = pathlib.Path("/sys/fs/cgroup/memory.max")
LEAST = 2  # XLA compiles a batch of size 1 to another program, which rounds differently.

# Flags that do not change compiled programs: the number of simulated CPU devices, and dumps.
_NO_EFFECT = ("--xla_force_host_platform_device_count", "--xla_dump")
_OPTIONS = (
    *("jax_disable_jit", "jax_disable_most_optimizations", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"),
)
# Fields of /proc/cpuinfo that identify a processor. The name of its model is not enough: many
# processors share a name such as "Xeon", and a virtual machine may disable instructions of the
# processor. So the fields include the available vector instructions.
_MODEL = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
_VECTORS = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme")


def actual(device: Device | None) -> Device:
    """Returns the given device, or JAX's default device if it is None."""
    if device is not None:
        return device
    # The setting may be None, a device, or the name of a platform.
    chosen: Any = getattr(jax.config, "jax_default_device")  # noqa: B009, unknown to type checkers
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def platform_of(device: Device | None) -> str:
    """Returns the name of a device's platform, such as "cpu" or "gpu"."""
    return actual(device).platform


# Layout of chunks.


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the chunks of a computation are distributed among devices.

    Attributes:
        devices: the devices of all hosts; device d computes the d-th block of consecutive chunks.
            None stands for the default device, and then arrays are not committed to a device.
        m: the number of pairs.
        size: the number of pairs in a chunk.
    """

    devices: tuple[Device | None, ...]
    m: int
    size: int

    @functools.cached_property
    def chunks(self) -> int:
        """The number of chunks; the last chunk is padded to full size."""
        return -(-self.m // self.size)

    @functools.cached_property
    def block(self) -> int:
        """The number of chunks of each device; the last devices may have fewer."""
        return -(-self.chunks // len(self.devices))

    @functools.cached_property
    def local(self) -> dict[int, Device | None]:
        """The devices of this host, by their index in `devices`."""
        here = jax.process_index()
        # The devices of one host need not be adjacent in the mesh, so their indices are stored.
        return {d: x for d, x in enumerate(self.devices) if x is None or x.process_index == here}

    @functools.cached_property
    def local_mesh(self) -> Mesh | None:
        """The mesh of this host's devices; None if there is only one device."""
        return row_of(self.local.values())

    def chunks_of(self, d: int) -> range:
        """Returns the chunks that device d computes."""
        # Each device has consecutive chunks, so concatenating the rows of all devices in order
        # gives all pairs in order.
        return range(min(d * self.block, self.chunks), min((d + 1) * self.block, self.chunks))

    def steps(
        self, found: Container[int] = (), among: range = range(sys.maxsize)
    ) -> list[list[int | None]]:
        """Lists, for each step, one chunk for every device of this host.

        The entry is None for a device that has no chunk left. Chunks in `found` are skipped.
        """
        missing = [
            [c for c in self.chunks_of(d) if c in among and c not in found] for d in self.local
        ]
        return list(map(list, itertools.zip_longest(*missing)))

    def pairs_in(self, chunk: int | None) -> int:
        """Returns the number of pairs in a chunk; 0 if `chunk` is None.

        The last chunk may have fewer pairs than the others.
        """
        return 0 if chunk is None else min(self.size, self.m - chunk * self.size)


def row_of(devices: Collection[Device | None]) -> Mesh | None:
    """A mesh with one axis over several devices; None for a single device."""
    return Mesh(np.array(tuple(devices)), (AXIS,)) if len(devices) > 1 else None


def devices_of(mesh: Mesh | None, *, calls_host: bool) -> tuple[Device | None, ...]:
    """Returns the devices of a mesh, as a tuple; the names and types of its axes do not matter.

    A CPU may simulate several devices. If programs call the host, only one device per process is
    used: callbacks share a thread pool, in which at most one callback per core can run.
    """
    if mesh is None:
        return (None,)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    devices = tuple(mesh.devices.flat)
    processes = {x.process_index for x in devices}
    if jax.process_index() not in processes:
        raise ValueError(
            f"mesh must have devices of every process, got none of this process: {mesh}"
        )
    if devices[0].platform == "cpu" and calls_host:
        return tuple({x.process_index: x for x in reversed(devices)}.values())[::-1]
    return devices


def placed(key: jax.Array, layout: Layout) -> jax.Array:
    """Copies the key to this host's devices."""
    if layout.devices == (None,) and len(key.devices()) == 1:
        return key
    # The key is copied through the host, because a key that is committed to a device or mesh cannot
    # be moved to another device directly.
    data: Any = np.asarray(jax.random.key_data(key))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    devices = list(layout.local.values())
    return key if len(devices) > 1 else jax.device_put(key, devices[0])


def outside_any_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function so that it can also be called inside of `jax.set_mesh`.

    The surrounding mesh is hidden from the function. Otherwise, explicit axes of the mesh would
    become part of the types of all arrays in the function.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.sharding.get_abstract_mesh().empty or _checks.is_staging():
            return function(*args, **kwargs)
        mesh, device = kwargs.get("mesh"), actual(None)
        if isinstance(mesh, Mesh) and mesh.devices.size == 1:
            device = mesh.devices.item()
        # A mesh without axes hides the surrounding mesh. JAX has no value that means "no mesh".
        with jax.set_mesh(Mesh(np.array(device), ())):
            return function(*args, **kwargs)

    return alone


def within(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which to call a program that runs on the devices of a mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


# Memory.


def fitting(each: int, device: Device | None) -> int:
    """Returns how many items of `each` bytes fit on a device, rounded to a power of two."""
    budget = _CHUNK_BYTES.get(platform_of(device), _ACCELERATOR_CHUNK_BYTES)
    most = max(LEAST, budget // max(1, each))
    # The number is rounded down to a power of two, so that small changes of the estimate rarely
    # change the compiled program.
    return 2 ** (most.bit_length() - 1)


def share_of_memory(devices: Collection[Device | None]) -> int:
    """Returns how many bytes one chunk may take on each device: a quarter of its memory."""
    # XLA limits how much it allocates on an accelerator. It has no such limit for CPUs, which share
    # the memory of the host.
    stated = [(actual(device).memory_stats() or {}).get("bytes_limit") for device in devices]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = min(machine, _stated_in(_CONTAINER))
    return int(_SHARE * min(limit or host / len(devices) for limit in stated))


# The result is cached, because reading the file for every sample would take a noticeable fraction
# of a millisecond.
@functools.cache
def _stated_in(file: pathlib.Path) -> float:
    """Returns the memory limit in a file of the container; infinity if it has no number."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return math.inf


# Compilation.


def compilation(devices: tuple[Any, ...]) -> dict[str, str]:
    """Describes what determines the bits of a program's outputs, besides the program itself."""
    used = [actual(device) for device in devices]
    libraries = f"dpjax {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
    kinds = sorted({device.device_kind for device in used})
    words = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    flags = [word for word in words if not word.startswith(_NO_EFFECT)]
    options = [f"{name}={getattr(jax.config, name, None)}" for name in _OPTIONS]
    return {
        "backend": used[0].platform,
        "processor": _processor() if used[0].platform == "cpu" else ", ".join(kinds),
        "compiler flags": " ".join(flags + options),
        "versions": f"{libraries}, {used[0].client.platform_version}",
    }


@functools.cache
def _processor() -> str:
    """Describes the processor by its model and vector instructions, as Linux reports them."""
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    instructions = fields.get("flags", fields.get("Features", "")).split()
    vectors = sorted(word for word in instructions if word.startswith(_VECTORS))
    model = [fields[name] for name in _MODEL if name in fields]
    return " ".join([platform.machine(), *model, *vectors])
