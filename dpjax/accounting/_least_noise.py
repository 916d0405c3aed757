"""The search for the least noise multiplier with which a training keeps a promise."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from dpjax._core import _checks
from dpjax._core._values import NeighboringRelation
from dpjax.accounting._compose_events import AccountingMethod
from dpjax.accounting._composed_steps import NoEpsilonError
from dpjax.accounting._dp_sgd import Columns, DpSgdRun, Sampling

LEAST_NOISE, MOST_NOISE = 1e-2, 1e9
_OUTWARD = 1 + 1e-9
# A search must return a noise multiplier whose epsilon is at least this fraction of the requested
# epsilon.
_MET = 0.99
# Settings (`coarseness`, `within`) of all searches except the last. The loss intervals are wider
# than in the last search by the factor `coarseness`. The logarithm of the noise multiplier is found
# to the precision `within`. Each search starts from the result of the search before.
_COARSE = ((32.0, 0.05), (8.0, 2e-3))
_WITHIN = 1e-3
# If intervals are wide, the estimated slope of log epsilon against the log of the noise multiplier
# may be too large. Then steps toward the root are too short. At an estimate of 5 or more, a step
# might not come any nearer to the root. So estimates above this maximum are reduced to it.
_STEEPEST = 3.0


def dp_sgd_noise_multiplier(
    sampling: Sampling,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    steps: int,
    dims: int,
    strategy: Columns | None = None,
    relation: NeighboringRelation | None = None,
    method: AccountingMethod = "pld",
) -> float:
    """The least noise multiplier for which a run of DP-SGD is (epsilon, delta)-DP.

    Instead of epsilon and delta, you may bound the advantage of any membership attack: its true
    positive rate minus its false positive rate.

    Args:
        sampling: how batches are drawn.
        epsilon: the epsilon of the guarantee, finite, above 0.
        delta: the delta of the guarantee, in (0, 1).
        advantage: instead of epsilon and delta, the advantage of `dp_sgd_risk`, in (0, 1).
        steps: the number of steps.
        dims: how many numbers get noise in a step.
        strategy: the strategy of correlated noise, as for `dp_sgd`.
        relation: which databases are neighbors, as for `dp_sgd`.
        method: as for `dp_sgd`.

    Returns:
        A noise multiplier of at least .01, which is at most .1% above the least one.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or no noise gives the guarantee; if batches that
            exceed their capacity need more than a tenth of delta at this epsilon (then the message
            says which capacity is large enough); or if "renyi" has no noise multiplier near this
            epsilon.

    Formal guarantees:
        With the returned noise multiplier, `dp_sgd` returns at most this epsilon. The function
        checks this at the end.

    Source:
        See `dp_sgd`.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> z = dpjax.accounting.dp_sgd_noise_multiplier(
        ...     sampling, epsilon=2.0, delta=1e-5, steps=100, dims=10, method="renyi"
        ... )
        >>> round(z, 2)
        1.44
    """
    if advantage is not None:
        if epsilon is not None or delta is not None or method != "pld":
            raise ValueError(
                'advantage must be given without epsilon and delta, and method must be "pld", got'
                f" {epsilon=}, {delta=}, {method=}"
            )
        run = DpSgdRun(sampling, steps, 0.5, dims, relation, "pld", strategy=strategy).checked()
        return _noise_for_advantage(run, advantage)
    if epsilon is None or delta is None:
        raise ValueError(
            f"epsilon and delta, or advantage alone, must be given, got {epsilon=}, {delta=}"
        )
    run = DpSgdRun(sampling, steps, delta, dims, relation, method, strategy=strategy).checked()
    target = _checks.concrete_positive("epsilon", epsilon)
    if 2 * run.loss < target:
        run.check_within_reach(target)
    # Even the largest noise multiplier leaves some epsilon, because noise tables are inexact, and
    # because a batch may exceed its capacity.
    if run.epsilon(MOST_NOISE) > target:
        other = "" if method == "pld" else ', or method="pld"'
        raise NoEpsilonError(
            f"no noise multiplier up to {MOST_NOISE:g} reaches epsilon={target:g} in {steps} steps"
            f" at delta={delta:g}: take fewer steps, or a larger epsilon or delta{other}"
        )
    if method == "renyi":
        # Other methods search first with wide loss intervals, which is fast, and then with narrow
        # ones. Renyi divergences are computed without loss intervals, so one search is enough.
        z = math.exp(_search(run.epsilon, target, 0.0, 0.0, _WITHIN).enough.at)
        # If the best order is the largest of the orders that are tried, epsilon jumps as a function
        # of the noise multiplier.
        reached = run.epsilon(z)
        if reached < _MET * target and z > LEAST_NOISE * _OUTWARD:
            raise NoEpsilonError(
                f'method="renyi" finds no noise multiplier with an epsilon near {target:g} at'
                f" delta={run.delta:g}: the least noise multiplier with at most this epsilon is"
                f' {z:.4g}, but its epsilon is only {reached:.3g}; use method="pld"'
            )
        return z
    return least_noise(run.epsilon, target)


def _noise_for_advantage(run: DpSgdRun, advantage: float) -> float:
    target = _checks.fraction("advantage", advantage)
    _checks.host_only("advantage", target, "a concrete number")
    if run.advantage(MOST_NOISE) > target:
        raise NoEpsilonError(
            f"no noise multiplier up to {MOST_NOISE:g} reaches advantage={target:g} in {run.steps}"
            " steps: take fewer steps, a larger advantage, or batches with a larger capacity"
        )
    return least_noise(run.advantage, target)


class _Point(NamedTuple):
    """A noise multiplier z that was tried.

    Attributes:
        at: log(z).
        excess: log(epsilon at z / target epsilon). If the target is an advantage, it is
            log(advantage at z / target advantage).
    """

    at: float
    excess: float


class _Bracket(NamedTuple):
    """A point with too little noise and one with enough noise.

    A point that has not been found yet is infinitely far away.
    """

    little: _Point = _Point(-math.inf, math.inf)
    enough: _Point = _Point(math.inf, -math.inf)
    # How fast the excess falls with log(z), from an earlier and coarser search; 0 if there was
    # none.
    known_slope: float = 0.0

    @property
    def slope(self) -> float:
        fall = self.little.excess - self.enough.excess
        return fall / (self.enough.at - self.little.at) if math.isfinite(fall) else self.known_slope

    @property
    def root(self) -> float:
        """Returns the log(z) at which the line through `little` and `enough` has excess 0.

        If `little` is not known, the line through `enough` falls at the rate `known_slope`. If
        `known_slope` is 0, too, the result is `enough.at`.
        """
        if not self.slope or math.isinf(self.enough.excess):
            return self.enough.at
        return self.enough.at + self.enough.excess / self.slope

    def narrow(self, within: float) -> bool:
        """Whether the search may end: noise below (1 - `within`) times `enough` is too little.

        This is known if `little` is close to `enough`. It is also known if `known_slope` is above 0
        and the excess at `enough` is close to 0. The slope may be inexact, so the smaller of
        `known_slope` / 2 and 1 is used in its place. The search also ends at `LEAST_NOISE`.
        """
        if self.enough.at <= math.log(LEAST_NOISE):
            return True
        width, fall = self.enough.at - self.little.at, min(self.known_slope / 2, 1.0)
        return width <= within or -self.enough.excess < fall * within

    def next(self, margin: float) -> float:
        """Returns the next log(z) to try, near the estimated root."""
        little, enough = self.little, self.enough
        if math.isinf(little.at) or math.isinf(enough.at):
            return self._outside(margin)
        if math.isinf(little.excess) or math.isinf(enough.excess):
            return (little.at + enough.at) / 2
        # The point is moved toward the farther end, so that both ends approach the root.
        root = self.root
        root += margin if enough.at - root > root - little.at else -margin
        return min(max(root, little.at + margin), enough.at - margin)

    def _outside(self, margin: float) -> float:
        """Returns the next log(z) to try if only one of `little` and `enough` is known."""
        known = self.little if math.isinf(self.enough.at) else self.enough
        if self.known_slope:  # A point just above the root may end the search.
            move = known.excess / self.known_slope + margin / 2
        else:
            move = known.excess + (margin if known is self.little else -margin)
        return known.at + min(max(move, -1.0), 1.0)


def least_noise(promised: Callable[..., float], target: float) -> float:
    """Returns a z that is at most 0.1% above the least z >= 0.01 with promised(z) <= target.

    Args:
        promised: a decreasing function. Its keyword `coarseness` makes it faster and increases its
            values. If it falls more slowly than 1 / z, the returned z may be further above the
            least z. But promised(z) <= target is always true.
        target: the largest number that may be promised.
    """
    start, slope = 0.0, 0.0
    for coarseness, within in _COARSE:
        about = functools.partial(_extrapolated, promised, coarseness)
        found = _search(about, target, start, slope, within)
        start, slope = found.root, min(found.slope, _STEEPEST)
    found = _search(promised, target, start + _WITHIN / 5, slope, _WITHIN)
    return math.exp(found.enough.at)


def _extrapolated(promised: Callable[..., float], coarseness: float, z: float) -> float:
    """Estimates promised(z) for very narrow intervals, from wide intervals of two widths.

    Intervals of width w increase promised(z) by about c w^2, where c does not depend on w.
    """
    wide = promised(z, coarseness=2 * coarseness)
    narrow = promised(z, coarseness=coarseness)
    return narrow - (wide - narrow) / 3


def _search(
    promised: Callable[[float], float], target: float, start: float, slope: float, within: float
) -> _Bracket:
    """Returns a narrow bracket of the least z with promised(z) <= target."""
    bracket, at = _Bracket(known_slope=slope), start
    while not bracket.narrow(within):
        at = max(at, math.log(LEAST_NOISE))
        point = _Point(at, _excess(promised, math.exp(at), target))
        if point.excess <= 0:
            bracket = bracket._replace(enough=point)
        else:
            bracket = bracket._replace(little=point)
        at = bracket.next(0.4 * within)
    return bracket


def _excess(promised: Callable[[float], float], z: float, target: float) -> float:
    try:
        value = promised(z)
    except NoEpsilonError:
        return math.inf
    if not math.isfinite(value):  # Extrapolation of infinite values is not a number.
        return math.inf
    if value <= target:  # Rounding of the logarithm must not decide this.
        return min(math.log(value / target), 0.0) if value > 0 else -math.inf
    return max(math.log(value / target), math.ulp(0.0))
