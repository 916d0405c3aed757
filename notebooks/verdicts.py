"""What the notebooks share: how large they are executed, and what they find."""

import dataclasses
import os
from collections.abc import Mapping

__all__ = [
    "SMALL",
    "BrokenVerdictError",
    "Verdict",
    "size",
    "verdict",
]

SWITCH = "DPJAX_NOTEBOOKS"
SIZES = ("full", "small")

if (_chosen := os.environ.get(SWITCH) or "full") not in SIZES:
    raise ValueError(f"{SWITCH} must be one of {', '.join(SIZES)}, got {_chosen!r}")
SMALL = _chosen == "small"
"""Whether the environment says DPJAX_NOTEBOOKS=small: the same code in seconds, with few draws."""


def size(full: int, *, small: int) -> int:
    """A number of draws, by the size at which the notebook is executed."""
    return small if SMALL else full


class BrokenVerdictError(AssertionError):
    """A notebook records what its numbers no longer say."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a claim, and the findings that decided; a notebook shows it as text.

    Attributes:
        word: "holds", "holds in part" or "does not hold".
        claim: of the paper, with the number of its figure, table or example.
        findings: sentences with numbers, for and against the claim.
    """

    word: str
    claim: str
    findings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.word.upper()}: {self.claim}", *(f"- {x}" for x in self.findings)])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        findings = "\n".join(f"- {finding}" for finding in self.findings)
        return f"**Verdict: {self.word}.** {self.claim}\n\n{findings}"


def verdict(
    recorded: str,
    claim: str,
    *,
    supported_by: Mapping[str, object] | None = None,
    contradicted_by: Mapping[str, object] | None = None,
) -> Verdict:
    """Checks that a claim still fares as the notebook records.

    Args:
        recorded: "holds", "holds in part" or "does not hold".
        claim: in the paper's terms.
        supported_by: findings for the claim, each with whether the numbers still say so.
        contradicted_by: findings against it, likewise.

    Returns:
        The verdict: "holds" where nothing contradicts the claim, "does not hold" where nothing
        supports it.

    Raises:
        BrokenVerdictError: if a finding is no longer true.
        ValueError: if the findings given do not amount to the recorded word.
    """
    supported_by, contradicted_by = supported_by or {}, contradicted_by or {}
    findings = {**supported_by, **contradicted_by}
    broken = [finding for finding, still_true in findings.items() if not still_true]
    if broken:
        raise BrokenVerdictError(f"{claim}\nno longer true:\n" + "\n".join(broken))
    against = "holds in part" if supported_by else "does not hold"
    word = against if contradicted_by else "holds"
    if word != recorded or not findings:
        raise ValueError(f"{len(findings)} findings say {word!r}, the notebook {recorded!r}")
    return Verdict(word, claim, tuple(findings))
