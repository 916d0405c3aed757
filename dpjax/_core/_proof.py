"""The record of a proof that a sensitivity carries."""

from collections.abc import Callable


class Proof:
    """The steps of a proof, as text. All proofs are alike to JAX: they change no program.

    Attributes:
        steps: one line for each step.
        losses: measures what steps lose; it takes the lines to annotated ones.
    """

    def __init__(
        self,
        steps: tuple[str, ...],
        losses: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
    ) -> None:
        self.steps = steps
        self.losses = losses

    def explained(self) -> str:
        """All steps, and what they lose: measured at the first call, and kept."""
        if self.losses is not None:
            self.steps, self.losses = self.losses(self.steps), None
        return "\n".join(self.steps)

    def __getstate__(self) -> dict[str, object]:
        """Without a program, which cannot be pickled."""
        return {"steps": self.steps, "losses": None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proof)

    def __hash__(self) -> int:
        return hash(Proof)
