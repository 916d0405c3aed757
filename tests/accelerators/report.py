"""The page that says what programs cost on accelerators."""

import pathlib
from typing import Any

from accelerators.facts import Facts

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "accelerators.md"


def line(facts: Facts) -> str:
    """The facts in one line."""
    return (
        f"{facts.compile_seconds:5.1f} s, {facts.temporary / 2**20:6.1f} MiB,"
        f" {facts.flops:.1e} flops, {facts.bytes:.1e} bytes,"
        f" {facts.launches} launches, {facts.loops} loops, {facts.wide} wide"
    )


def write(found: dict[str, dict[str, Any]]) -> None:
    """Replaces the tables of the page."""
