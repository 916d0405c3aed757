"""How much of a batch fits into memory."""

from dpjax._running._layout import Device, platform_of

# On a CPU the fastest chunk fits the cache; on an accelerator memory decides.
_CHUNK_BYTES = {"cpu": 2 * 2**20}
_ACCELERATOR_CHUNK_BYTES = 256 * 2**20
_LEAST = 2  # XLA compiles a batch of one to a program of its own, with other roundings.


def fitting(each: int, device: Device | None) -> int:
    """How many fit on a device, where each adds so many bytes: a power of two."""
    budget = _CHUNK_BYTES.get(platform_of(device), _ACCELERATOR_CHUNK_BYTES)
    most = max(_LEAST, budget // max(1, each))
    # A power of two, so that a byte more or less of an estimate seldom makes another program.
    return 2 ** (most.bit_length() - 1)
