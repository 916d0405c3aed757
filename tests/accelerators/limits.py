"""What a program for an accelerator must not do; `limits.toml` says how much of the rest."""

import pathlib
import tomllib
from typing import Any

from accelerators.facts import Facts

TABLE = pathlib.Path(__file__).with_name("limits.toml")


def read() -> dict[str, Any]:
    """The table: limits of all programs, and of each program on each platform."""
    return tomllib.loads(TABLE.read_text())


def problems(facts: Facts, platform: str, name: str) -> list[str]:
    """What a program does that its row of the table does not allow; without a row, it fails."""
    table = read()
    row = table[platform].get(name)
    if row is None:
        return [f"limits.toml has no row for it under [{platform}]"]
    return broken(facts, {**table["all"], **row})


def broken(facts: Facts, limits: dict[str, int]) -> list[str]:
    """A sentence for each limit that a program breaks."""
    found = []
    if facts.calls_host:
        found.append("it calls the host")
    if facts.host:
        found.append(f"it takes {facts.host} bytes of the host's memory")
    if facts.doubles:
        found.append(f"{facts.doubles} instructions compute with float64")
    if facts.temporary > limits["temporary_mib"] * 2**20:
        found.append(
            f"it takes {facts.temporary / 2**20:.0f} MiB of temporary memory, and"
            f" {limits['temporary_mib']} are allowed"
        )
    for name in ("launches", "loops", "wide"):
        count = getattr(facts, name)
        if count is not None and count > limits[name]:
            found.append(f"it has {count} {name}, and {limits[name]} are allowed")
    return found
