"""One sample of distances, at a whole grid of operating points."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dpjax import _checks
from dpjax.base import Method
from dpjax.operating_points import confidence_of_each, operating_point

_MARGINAL = "marginal"
# Datasets select by sel(name=value), where "method" means something else.
_DIMENSIONS = ("operating_method", "confidence", "gamma")


def sensitivity_grid(
    distances: jax.Array,
    *,
    gammas: Sequence[float],
    choices: int,
    methods: Sequence[Method] = ("exact",),
    confidences: Sequence[float | None] = (0.99,),
) -> Any:
    """The estimates of one sample of distances at every gamma, method and confidence.

    Which order statistic each operating point takes does not depend on the distances, so one pass
    finds all of them. What is promised depends on what the estimates are used for:

    - `choices=1`: each point promises what `dpjax.operating_point` says, if it was fixed before
      the distances, or anything that depends on them, were looked at. Comparing all points in a
      figure is fine; releasing at the one that looked best is not.
    - `choices=J`: any J points that were fixed in advance promise what they say together, so one
      of them may be picked after looking. Each is taken at confidence 1 - (1 - C)/J, a union bound:
      a larger order statistic. To pick from all of the grid, J is the number of its points; reruns
      under other keys from which one is picked count too, and so do other targets.

    Args:
        distances: of `dpjax.sensitivity_samples`, shape (m,); NaN and negative numbers count as
            infinite.
        gammas: probabilities over random pairs that may be left uncovered.
        choices: J, from how many points one is picked after looking at anything that depends on
            the distances; 1 for none.
        methods: of "exact" and "dkw".
        confidences: probabilities C over the samples; None for the marginal statement, over
            samples and pair together, which is the only one that "dkw" makes.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep") over operating_method, confidence (a string,
        "marginal" for None) and gamma: `sensitivity`, the estimate; `k`, the order statistic, 0
        where m is too small for the point or the method does not make the statement, and the
        estimate is NaN; `confidence_taken`, at which k was found, 1 - (1 - C)/J, NaN where
        marginal. They are for study and have none of the checks of `dpjax.sample_sensitivity`: it
        gives what may be released, with the same key, m, gamma and `confidence=confidence_taken`.
        Its guarantee says that confidence, which one point has by itself; after a choice among J
        what holds is C.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if distances are not floats, or a parameter is not a number.
        ValueError: if a parameter is out of range, given twice, or missing; or if choices exceed 1
            where a statement is marginal: none survives a choice after looking.

    Formal guarantees:
        Let the m distances be independent draws, as `dpjax.sensitivity_samples` makes them, with
        distribution function Phi, and let J points with a confidence be fixed in advance. With
        probability at least 1 - sum_j (1 - C_j)/J all of them have Phi(estimate) >= 1 - gamma. In
        particular, for every C, the probability that one with confidence C is picked, however that
        depends on the samples, and does not hold, is at most 1 - C. At J = 1 that is
        Phi(estimate) >= 1 - gamma with probability at least C, or the marginal statement, for one
        point fixed in advance.

    Source:
        Wilks (1941); Rubinstein and Aldà (2017), Theorem 15; Boole's inequality.

    Example:
        >>> import jax
        >>> import dpjax
        >>> distances = jax.random.exponential(jax.random.key(0), (10_000,))
        >>> one = dpjax.sensitivity_grid(distances, gammas=[0.05, 0.01], choices=1)
        >>> either = dpjax.sensitivity_grid(distances, gammas=[0.05, 0.01], choices=2)
        >>> one.k.values.ravel().tolist(), either.k.values.ravel().tolist()
        ([9551, 9923], [9556, 9926])
    """
    xarray = _checks.extra("xarray", "sweep")
    ordered = _patterns(distances)
    choices = _checks.integer("choices", choices, least=1)
    labels = [_MARGINAL if c is None else repr(float(c)) for c in confidences]
    for name, values in zip(_DIMENSIONS, (methods, labels, gammas), strict=True):
        if not len(values) or len(set(values)) < len(values):
            raise ValueError(f"{name} must have distinct values, at least one, got {values!r}")
    if choices > 1 and ("dkw" in methods or None in confidences):
        raise ValueError(
            f"choices={choices} asks for statements that hold together, and marginal ones do not:"
            ' give confidences in (0, 1), with method "exact"'
        )
    taken = [
        c if c is None else confidence_of_each(_checks.fraction("confidences", c), choices)
        for c in confidences
    ]
    k = np.array(
        [
            [[_rank(ordered.size, gamma, method, c) for gamma in gammas] for c in taken]
            for method in methods
        ]
    )
    estimates = _order_statistics(ordered, k)
    known = np.array([np.nan if c is None else c for c in taken])
    return xarray.Dataset(
        {
            "sensitivity": (_DIMENSIONS, estimates),
            "k": (_DIMENSIONS, k),
            "confidence_taken": ("confidence", known),
        },
        {
            "operating_method": np.array(methods, dtype=object),
            "confidence": np.array(labels, dtype=object),
            "gamma": np.array(gammas, dtype=float),
        },
        {"m": ordered.size, "choices": choices},
    )


def _patterns(distances: Any) -> np.ndarray:
    array = _checks.host_numbers("distances", distances)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {array.shape}")
    if array.dtype.kind != "f":
        raise TypeError(f"distances must be floats, got dtype {array.dtype}")
    return np.where(array >= 0, array, np.inf)


def _rank(m: int, gamma: float, method: Method, confidence: float | None) -> int:
    """The order statistic of a point; 0 where there is none."""
    if method == "dkw" and confidence is not None:
        return 0
    settings: Any = {"method": method} if method == "dkw" else {"confidence": confidence}
    gamma = _checks.fraction("gammas", gamma)
    if gamma < operating_point(m=m, **settings).gamma:
        return 0
    return operating_point(m=m, gamma=gamma, **settings).k


def _order_statistics(distances: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The k-th smallest of all distances, for every k at once; NaN where it is 0."""
    ranks = np.unique(k[k > 0])
    estimates = np.full(k.shape, np.nan, distances.dtype)
    if ranks.size:
        estimates[k > 0] = np.partition(distances, ranks - 1)[k[k > 0] - 1]
    return estimates
