"""How much of a batch fits into memory."""

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Collection

from dpjax._running._layout import Device, actual, platform_of

# On a CPU the fastest chunk fits the cache; on an accelerator memory decides.
_CHUNK_BYTES = {"cpu": 2 * 2**20}
_ACCELERATOR_CHUNK_BYTES = 256 * 2**20
_SHARE = 1 / 4  # Two chunks are in flight, and the caller has arrays of its own.
_CONTAINER = pathlib.Path("/sys/fs/cgroup/memory.max")
LEAST = 2  # XLA compiles a batch of one to a program of its own, with other roundings.


def fitting(each: int, device: Device | None) -> int:
    """How many fit on a device, where each adds so many bytes: a power of two."""
    budget = _CHUNK_BYTES.get(platform_of(device), _ACCELERATOR_CHUNK_BYTES)
    most = max(LEAST, budget // max(1, each))
    # A power of two, so that a byte more or less of an estimate seldom makes another program.
    return 2 ** (most.bit_length() - 1)


def share_of_memory(devices: Collection[Device | None]) -> int:
    """The bytes that one chunk may take on each of some devices: a quarter of their memory."""
    # What XLA may allocate there. It sets CPUs no limit, and they share what the machine has.
    stated = [(actual(device).memory_stats() or {}).get("bytes_limit") for device in devices]
    return int(_SHARE * min(limit or _memory_of_the_host() / len(devices) for limit in stated))


def _memory_of_the_host() -> float:
    """What the machine has, or a container allows."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _stated_in(_CONTAINER))


@functools.cache  # To open a file takes a share of a millisecond, at every sampling.
def _stated_in(file: pathlib.Path) -> float:
    """The limit of a container; infinite where none is stated, or it is "max"."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return math.inf
