"""One sensitivity for several oracles: the worst of them, each at its share of the confidence."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Literal

from dpjax._core._values import Method, Oracle, Sensitivity
from dpjax._tracing._fingerprints import digest
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point


def stated_confidence(
    *,
    m: int | None,
    gamma: float | None,
    method: Method,
    confidence: float | Literal["default"] | None,
    until: float | None,
) -> float | None:
    """The confidence in all oracles together; None for the marginal statement."""
    method = method if until is None else "anytime"
    return operating_point(m=m, gamma=gamma, method=method, confidence=confidence).confidence


def worst_of_oracles(
    sample: Callable[..., Sensitivity],
    oracles: Sequence[Oracle],
    confidence: float | None,
    checkpoint: str | os.PathLike[str] | None,
) -> Sensitivity:
    """The largest sensitivity of some oracles.

    A marginal statement needs no share of anything: a larger estimate covers no fewer pairs.
    Oracle number j has the checkpoint PATH.oracle-j.
    """
    if not oracles:
        raise ValueError("oracle must be a function, or hold at least one, got none")
    each = confidence_of_each(confidence, len(oracles))
    found = []
    for j, oracle in enumerate(oracles):
        path = None if checkpoint is None else f"{os.fspath(checkpoint)}.oracle-{j}"
        found.append(sample(oracle, confidence=each, checkpoint=path))
    if len({(x.target, x.distance, str(x.records), str(x.outputs)) for x in found}) > 1:
        raise ValueError("oracles must draw records of the same structure, shapes and dtypes")
    worst = max(found, key=lambda x: float(x.value))
    deciding = {x.deciding_records for x in found}
    return dataclasses.replace(
        worst,
        gamma=max(float(x.gamma) for x in found),
        confidence=confidence,
        deciding_records=worst.deciding_records if len(deciding) == 1 else None,
        identity=digest("oracles", *sorted(str(x.identity) for x in found)),
    )
