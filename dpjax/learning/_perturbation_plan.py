"""How much noise objective perturbation needs: the numbers of its proof.

docs/proofs/objective-perturbation.md proves the guarantee; names here are its symbols. Noise b of
scale sigma enters the objective. The minimizer lies in a ball of radius W, except with a
probability that is charged. A record changes the density of the minimizer by a determinant (kappa)
and by a pull v, at most S long. v depends on b, so b'v is *not* normal: R, a Rayleigh variable,
bounds it. Computed weights lie within E of the minimizer, and noise of scale tau covers that. The
drawn noise is at least as wide as the proof assumes. The certificate of the tables is charged for
2 d coordinates.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy

from dpjax._core._values import Scalar
from dpjax.learning._perturbed_minimizer import solver_error, solver_plan
from dpjax.mechanisms._gaussian_calibration import analytic_multiplier
from dpjax.random._facade import GAUSSIAN, Calibration, Lattice
from dpjax.targets._bounds import unit
from dpjax.targets._strong_convexity import WalkPlan

# A bound on the distance between the gradients of two records in the unit ball: each is shorter
# than 1.
_REACH = 2.0
# The part of delta for noise that is longer than B: 10^-6 in the proof.
_LONGER = 1e-6
# Ends of intervals of a Rayleigh variable. The expectation is bounded by a sum over them.
_INTERVALS = np.linspace(0.0, 14.0, 2001)
# Covers the roundings of this file, which computes in float64.
_OUTWARD = 1 + 1e-9
# A limit for steps of the solver. Newton's steps sufficed in all tests, but that is no proof, and
# float32 counts no further than 2^24.
_MOST_STEPS = 1e7
# A bound on the drawn scale over the planned one, without the charge for rounding to the grid.
_DRAWN = 1 + 2.0**-10


class PerturbationPlan(NamedTuple):
    """The numbers of objective perturbation, all public.

    Attributes:
        linear_scale: sigma, of the linear term's noise.
        output_scale: tau, of the noise on the weights.
        error: E, a bound on the distance of the computed weights from the minimizer.
        pull: S, a bound on the pull of a record.
        solver: finds the weights.
    """

    linear_scale: Scalar
    output_scale: Scalar
    error: Scalar
    pull: Scalar
    solver: WalkPlan


def perturbation_plan(
    regularization: float, *, n: int, d: int, epsilon: float, delta: float, dtype: np.dtype
) -> PerturbationPlan:
    """The least noise that the proof allows.

    mu^2 = mu_1^2 + mu_2^2 is shared between two noises. That of the linear term moves the weights
    as if it were noise for the sensitivity 2 / (n lambda). That of the weights is noise for the
    sensitivity 2 E. Shares in proportion to these leave the least variance.
    """
    left_epsilon, left_delta = _left_by_tables(epsilon, delta, d)
    left_epsilon -= math.log1p(1 / (4 * n * regularization)) * _OUTWARD
    if not left_epsilon > 0:
        least = 1 / (4 * n * math.expm1(epsilon))
        raise ValueError(
            f"regularization must be above {least:.3g} for epsilon={epsilon:g} and n={n}: at"
            f" {regularization:g} the curvature of one record alone is worth more"
        )

    def planned(share: float, pull: float) -> PerturbationPlan:
        """The plan in which `share` of mu^2 is for the weights, for a known bound on the pull."""
        mu = _largest_mu(left_epsilon, left_delta, share)
        sigma = 2 * pull / (mu * math.sqrt(1 - share))
        grid, longest, eps = _grid(sigma, d), _longest(sigma, d, delta), float(unit(dtype))
        # b is drawn on a grid, and divided by n in floats.
        rounding = grid * math.sqrt(d) + 2 * eps * longest
        linear = (longest + rounding) / n
        solver = solver_plan(regularization, pull=linear, d=d, eps=eps)
        solved = solver_error(regularization, solver, pull=linear, d=d, eps=eps)
        error = (solved + rounding / (n * regularization)) * _OUTWARD
        return PerturbationPlan(sigma, 2 * error / (mu * math.sqrt(share)), error, pull, solver)

    # E depends on sigma, and sigma on the share, so the share follows from a first plan. Any share
    # is private: only the variance depends on it.
    error = float(planned(0.5, 1.0).error)
    share = error / (error + 1 / (n * regularization))
    # S < 1 needs W, and W needs sigma. With S = 1 there is more noise, so its ball is larger, and
    # holds the minimizer of the final plan too.
    radius = float(planned(share, 1.0).solver.radius)
    plan = planned(share, _OUTWARD / (1 + math.exp(-radius)))
    if plan.solver.most_steps > _MOST_STEPS:
        raise ValueError(
            f"regularization={regularization:g} is too small: the solver might take"
            f" {plan.solver.most_steps:.2g} steps, more than {_MOST_STEPS:g}"
        )
    for calibration in calibrations(plan, d, dtype):
        if not calibration.fits(_lattice(), dtype):
            raise ValueError(f"no grid of {dtype} can carry the noise of epsilon={epsilon:g}")
    return plan


def calibrations(
    plan: PerturbationPlan, d: int, dtype: np.dtype
) -> tuple[Calibration, Calibration]:
    """The calibrations of the noise of b and of the noise of the weights."""

    def one(scale: Scalar, sensitivity: Scalar) -> Calibration:
        # The certificate of the tables is charged by the plan.
        return Calibration(scale, sensitivity, math.inf, math.sqrt(d), d, False, dtype)

    return one(plan.linear_scale, _REACH), one(plan.output_scale, 2 * plan.error)


def _left_by_tables(epsilon: float, delta: float, d: int) -> tuple[float, float]:
    """Epsilon and delta without the certificate of 2 d coordinates and without too long noise."""
    certificate = _lattice().certificate
    loss, missed = 2 * d * certificate.loss, 2 * d * certificate.delta
    outside = missed * (1 + math.exp(min(epsilon, 700.0)))
    left = delta * (math.exp(-loss) / _OUTWARD - _LONGER) - outside * _OUTWARD
    if not left > delta / 2:
        raise ValueError(
            f"delta={delta!r} is too small for epsilon={epsilon:g} and {d} features: the tables of"
            f" the noise alone take {outside:.2g}"
        )
    return epsilon - 2 * loss, left


def _largest_mu(epsilon: float, delta: float, share: float) -> float:
    """The largest mu that keeps (epsilon, delta), if the output's noise has a share of mu^2.

    Delta is the sum of H(mu, epsilon) and of 2/3 of the expectation; both grow with mu. The search
    is for the logarithm of the first part.
    """
    low, high = math.log(delta) - 30, math.log(delta)
    for _ in range(40):
        middle = (low + high) / 2
        mu = 1 / float(analytic_multiplier(epsilon, math.exp(middle)))
        exceeds = math.exp(middle) + 2 / 3 * _of_lengths(mu, epsilon, share) * _OUTWARD > delta
        low, high = (low, middle) if exceeds else (middle, high)
    if low == math.log(delta) - 30:
        raise ValueError(f"epsilon={epsilon:g} is too small for delta={delta:g}")
    return 1 / float(analytic_multiplier(epsilon, math.exp(low))) / _OUTWARD


def _of_lengths(mu: float, epsilon: float, share: float) -> float:
    """A bound on E H(mu_2, epsilon - mu_1^2 / 2 - mu_1 R / 2)."""
    first, second = mu * math.sqrt(1 - share), mu * math.sqrt(share)
    left = epsilon - first**2 / 2 - first * _INTERVALS[1:] / 2
    one = scipy.special.ndtr(second / 2 - left / second)
    other = np.exp(left + scipy.special.log_ndtr(-second / 2 - left / second))
    # P(R > r) = exp(-r^2 / 2). The divergence grows with R, so each interval counts at its end, and
    # the last one, without an end, counts 1.
    tails = np.exp(-(_INTERVALS**2) / 2)
    # If the two nearly cancel, their rounding is large relative to the difference.
    divergence = np.maximum(one - other, 0) + 1e-10 * one
    return float((tails[:-1] - tails[1:]) @ divergence + tails[-1])


def _longest(sigma: float, d: int, delta: float) -> float:
    """B, at a bound on the drawn scale."""
    drawn = sigma * _DRAWN * (1 + math.sqrt(d) * _grid(sigma, d) / _REACH)
    return drawn * (math.sqrt(d) + math.sqrt(-2 * math.log(_LONGER * delta))) + _REACH


def _grid(sigma: float, d: int) -> float:
    """A bound on the grid of b: twice the number to which the fit's power of two is nearest."""
    balanced = math.sqrt(sigma / _REACH * math.sqrt(d) / _lattice().resolution)
    return 2 * _REACH * max(balanced, 2.0**-17) / math.sqrt(d)


def _lattice() -> Lattice:
    assert GAUSSIAN.lattice is not None
    return GAUSSIAN.lattice
