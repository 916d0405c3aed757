"""`sensitivity_grid`: one sample of distances, evaluated at a grid of operating points."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import Method
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point

if TYPE_CHECKING:
    from xarray import Dataset

_MARGINAL = "marginal"
# The first dimension is not called "method", because `Dataset.sel` has an argument of this name.
_DIMENSIONS = ("operating_method", "confidence", "gamma")


def sensitivity_grid(
    distances: ArrayLike,
    *,
    gammas: Sequence[float],
    choices: int,
    methods: Sequence[Method] = ("exact",),
    confidences: Sequence[float | None] = (0.99,),
) -> "Dataset":
    """The estimates of one sample of distances at every gamma, method and confidence.

    Each estimate is an order statistic. Its rank does not depend on the distances, so one sample
    gives all estimates. The guarantees of the estimates depend on how you use them:

    - `choices=1`: each point has the guarantee of `dpjax.operating_point` if it was fixed before
      anyone looked at the distances, or at anything that depends on them. You may compare all
      points in a figure. You may not release at the point that looks best.
    - `choices=J`: any J points that were fixed in advance hold simultaneously, so you may pick one
      of them after looking. Each is computed at confidence 1 - (1 - C)/J, by a union bound. To pick
      from the whole grid, let J be the number of its points. If you also pick among reruns under
      other keys, or among targets, count these too.

    Args:
        distances: the result of `dpjax.sample_distances`, shape (m,). NaN and negative numbers
            count as infinite.
        gammas: probabilities over random pairs that may be left uncovered.
        choices: J, the number of points from which you pick one after looking at anything that
            depends on the distances; 1 without such a choice.
        methods: some of "exact", "dkw" and "anytime".
        confidences: probabilities C over the samples. None is the marginal statement, over samples
            and pair together; "dkw" supports only that.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep") over operating_method, confidence (a string,
        "marginal" for None) and gamma:

        - `sensitivity`: the estimate; NaN where k is 0;
        - `k`: the order statistic; 0 if m is too small, or the method does not support the
          statement;
        - `confidence_taken`: the confidence at which k was found, 1 - (1 - C)/J; NaN if marginal.

        The estimates are for study, and lack the checks of `dpjax.sample_sensitivity`. For a
        release, call that function with the same key, m, gamma and `confidence=confidence_taken`.
        Its guarantee states this confidence, which holds for a single point fixed in advance. After
        a choice among J points, C holds.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if distances are not floats, or a parameter is not a number.
        ValueError: if a parameter is out of range, given twice, or missing; or if choices exceed 1
            for a marginal statement, which would not hold after such a choice.

    Formal guarantees:
        Let the m distances be independent draws, as from `dpjax.sample_distances`, with
        distribution function Phi. Let J points with a confidence be fixed in advance. With
        probability at least 1 - sum_j (1 - C_j)/J all of them have Phi(estimate) >= 1 - gamma. So
        for every C, however the choice depends on the samples, the probability that the chosen
        point has confidence C and is wrong is at most 1 - C. At J = 1, a point fixed in advance has
        Phi(estimate) >= 1 - gamma with probability at least C, or satisfies the marginal statement.

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
    known_distances = _checked(distances)
    choices = _checks.integer("choices", choices, least=1)
    labels = [_MARGINAL if c is None else repr(float(c)) for c in confidences]
    for name, values in zip(_DIMENSIONS, (methods, labels, gammas), strict=True):
        if not len(values) or len(set(values)) < len(values):
            raise ValueError(f"{name} must have distinct values, at least one, got {values!r}")
    if choices > 1 and ("dkw" in methods or None in confidences):
        raise ValueError(
            f"choices must be 1 for marginal statements, got {choices}. Marginal statements do not "
            "hold simultaneously. For statements that do, give confidences in (0, 1), and method "
            '"exact"'
        )
    taken = [
        c if c is None else confidence_of_each(_checks.fraction("confidences", c), choices)
        for c in confidences
    ]
    k = np.array(
        [
            [[_rank(known_distances.size, gamma, method, c) for gamma in gammas] for c in taken]
            for method in methods
        ]
    )
    estimates = _order_statistics(known_distances, k)
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
        {"m": known_distances.size, "choices": choices},
    )


def _checked(distances: ArrayLike) -> np.ndarray:
    array = _checks.host_numbers("distances", distances)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {array.shape}")
    if array.dtype.kind != "f":
        raise TypeError(f"distances must be floats, got dtype {array.dtype}")
    return np.where(array >= 0, array, np.inf)


def _rank(m: int, gamma: float, method: Method, confidence: float | None) -> int:
    """Returns the rank of the order statistic of an operating point; 0 if there is none."""
    if (method == "dkw") == (confidence is not None) and method != "exact":
        return 0  # "dkw" makes only marginal statements, and "anytime" makes none of these.
    settings: Any = {"method": method}
    if method != "dkw":
        settings["confidence"] = confidence
    gamma = _checks.fraction("gammas", gamma)
    if gamma < operating_point(m=m, **settings).gamma:
        return 0
    return operating_point(m=m, gamma=gamma, **settings).k


def _order_statistics(distances: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the k-th smallest of all distances, for every k at once; NaN where k is 0."""
    ranks = np.unique(k[k > 0])
    estimates = np.full(k.shape, np.nan, distances.dtype)
    if ranks.size:
        estimates[k > 0] = np.partition(distances, ranks - 1)[k[k > 0] - 1]
    return estimates
