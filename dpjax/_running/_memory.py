"""How much of a batch fits into memory."""

import os

from dpjax._running._layout import Device, actual, platform_of

# On a CPU the fastest chunk fits the cache; on an accelerator memory decides.
_CHUNK_BYTES = {"cpu": 2 * 2**20}
_ACCELERATOR_CHUNK_BYTES = 256 * 2**20
_SHARE = 1 / 4  # Two chunks are in flight, and the caller has arrays of its own.
LEAST = 2  # XLA compiles a batch of one to a program of its own, with other roundings.


def fitting(each: int, device: Device | None) -> int:
    """How many fit on a device, where each adds so many bytes: a power of two."""
    budget = _CHUNK_BYTES.get(platform_of(device), _ACCELERATOR_CHUNK_BYTES)
    most = max(LEAST, budget // max(1, each))
    # A power of two, so that a byte more or less of an estimate seldom makes another program.
    return 2 ** (most.bit_length() - 1)


def share_of_memory(device: Device | None) -> int:
    """The bytes that one chunk may take on a device: a quarter of its memory."""
    # What XLA may allocate there. It sets a CPU no limit: then all that the machine has.
    stated = (actual(device).memory_stats() or {}).get("bytes_limit")
    return int(_SHARE * (stated or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
