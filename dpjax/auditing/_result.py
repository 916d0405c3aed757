"""The result of an audit."""

import dataclasses

from dpjax._core._types import Value
from dpjax.auditing._events import Event


@dataclasses.dataclass(frozen=True, eq=False)
class AuditResult:
    """A statistical lower bound on epsilon or delta, and the event that shows it.

    Attributes:
        epsilon: the lower bound, or the epsilon at which delta was bounded.
        delta: the lower bound, or the delta at which epsilon was bounded.
        bounded: the one of the two that is the bound: "epsilon" or "delta".
        claimed: the mechanism's own claim for the bounded one; None if it has no claim there.
        confidence: a lower bound on the probability, over the samples, that the bound holds.
        samples: the number of outputs of each of the two values.
        event: the event whose probabilities were bounded.
        swapped: whether `event` is likelier under `neighbor`, not under `value`.
        probability: a lower limit of the event's probability under the value where it is likelier.
        other_probability: an upper limit of its probability under the other value.
        value: the first input of the mechanism.
        neighbor: the second input.
        off_grid: the number of outputs, of either value, off the grid that the mechanism states.
        grid: that grid, in words; empty if none is stated.

    Formal guarantees:
        With probability at least `confidence` over the samples, no (epsilon', delta')-DP claim
        below the bound holds for the pair `value`, `neighbor`. A bound of 0 shows nothing: a
        mechanism may give away more on another pair, or by an event that was not tried.
    """

    epsilon: float
    delta: float
    bounded: str
    claimed: float | None
    confidence: float
    samples: int
    event: Event
    swapped: bool
    probability: float
    other_probability: float
    value: Value
    neighbor: Value
    off_grid: int = 0
    grid: str = ""

    @property
    def bound(self) -> float:
        """The lower bound: `epsilon` or `delta`, as `bounded` says."""
        return self.epsilon if self.bounded == "epsilon" else self.delta

    def __str__(self) -> str:
        at = ("delta", self.delta) if self.bounded == "epsilon" else ("epsilon", self.epsilon)
        likelier, other = ("neighbor", "value") if self.swapped else ("value", "neighbor")
        claimed = "" if self.claimed is None else f", claimed {self.claimed:.6g}"
        strayed = f"; {self.off_grid:,} outputs are not {self.grid}" if self.off_grid else ""
        return (
            f"{self.bounded} is at least {self.bound:.4g} at {at[0]} {at[1]:.6g}{claimed}"
            f" (confidence {self.confidence:.8g}, {self.samples:,} samples of each value):"
            f" the event [{self.event.description}] has probability at least"
            f" {self.probability:.4g} under {likelier}, at most {self.other_probability:.4g}"
            f" under {other}{strayed}"
        )

    def __repr__(self) -> str:
        return f"AuditResult({self})"
