"""Sampling that ends when more pairs would hardly change the estimate."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from dpjax._core._values import OperatingPoint
from dpjax._running._layout import Layout
from dpjax.sensitivity._anytime import least_k, lower_k

# Between two looks, the number of pairs grows by this share.
_GROWTH = 0.1
_Steps = list[list[int | None]]


@dataclasses.dataclass(eq=False)
class Watch:
    """Looks at the distances while they are drawn, at an operating point that allows it.

    Attributes:
        point: of method "anytime", at the most pairs that may be drawn.
        until: the ratio of the upper to the lower order statistic at which it ends; 1 for never.
        drawn: pairs so far.

    Formal guarantees:
        None of its own: the operating point holds at every number of pairs.
    """

    point: OperatingPoint
    until: float
    drawn: int = 0

    def parts(self, steps: _Steps, drawn: int, layout: Layout) -> Iterator[_Steps]:
        """The steps from one look to the next."""
        part: _Steps = []
        new = 0
        for step in steps:
            part.append(step)
            new += sum(map(layout.pairs_in, step))
            if new >= _GROWTH * drawn:
                yield part
                drawn, part, new = drawn + new, [], 0
        if part:
            yield part

    def has_seen_enough(
        self, distances: jax.Array, drawn: int, count: Callable[..., object]
    ) -> bool:
        """Whether to end, now that so many distances are finite or infinite ones of real pairs."""
        self.drawn = drawn
        confidence = self.point.confidence
        assert confidence is not None
        upper = least_k(drawn, self.point.gamma, confidence) if drawn else None
        if upper is None:
            return False
        lower = max(lower_k(drawn, self.point.gamma, confidence), 1)
        found = np.asarray(distances)
        found = found[(found >= 0) & (found < np.inf)]  # Most may not be drawn yet.

        def of_rank(k: int) -> float:
            return float(np.partition(found, k - 1)[k - 1]) if k <= found.size else np.inf

        low, high = of_rank(lower), of_rank(upper)
        count(0, f"sensitivity from {low:.4g} to {high:.4g}")
        return high <= self.until * low and 0 < high < np.inf and self.until > 1
