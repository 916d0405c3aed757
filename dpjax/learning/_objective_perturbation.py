"""Linear classifiers by objective perturbation: noise in the objective that is minimized.

docs/proofs/objective-perturbation.md proves the guarantee, and defines the symbols used here. A
normal vector b of scale sigma is added to the objective's gradient. The minimizer is in a ball of
radius W, except with a small probability, which is charged to delta. Replacing a record changes the
density of the minimizer by the ratio of two determinants (kappa) and by a shift v of b, called the
pull, with norm at most D. v depends on b, so b'v is *not* normal; its tails are bounded instead.
Computed weights are within E of the minimizer, and noise of scale tau on the weights covers that
distance. The drawn noise is at least as wide as the proof assumes. The error of the noise tables is
charged for 2 d coordinates.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, made, made_by_factory, static, up
from dpjax._core._records import record_arrays
from dpjax._core._types import Database, Key
from dpjax._core._values import Guarantee, Release, Scalar
from dpjax._exact._numerics import is_float
from dpjax.mechanisms._gaussian_multipliers import analytic_multiplier
from dpjax.random._grid_fit import Calibration
from dpjax.random._keys import check_key, key_for_each
from dpjax.random._noise import GAUSSIAN
from dpjax.random._release import add_noise
from dpjax.release._transaction import guarantee_under, pay_and_draw, request_of
from dpjax.targets._clamping import into_unit_ball
from dpjax.targets._known_sensitivity import running_dtype, unit
from dpjax.targets._minimizers import (
    WalkPlan,
    check_carried,
    check_strength,
    damping,
    logistic_gradient,
    logistic_step,
    walk_error,
    walk_plan,
    walk_to_minimizer,
)


class PerturbationPlan(NamedTuple):
    """The public parameters of objective perturbation, with the symbols of the proof.

    Attributes:
        linear_scale: sigma, the scale of the noise in the linear term.
        output_scale: tau, the scale of the noise on the weights.
        error: E, a bound on the distance of the computed weights from the minimizer.
        pull: D, a bound on the norm of the difference of two records' gradients.
        solver: the plan of the solver that computes the weights.
    """

    linear_scale: Scalar
    output_scale: Scalar
    error: Scalar
    pull: Scalar
    solver: WalkPlan


@made_by_factory
class ObjectivePerturbation:
    """Trains a private logistic regression: `training(key, database) -> Release`.

    Made by `learning.objective_perturbation`. Jit-able, and vmap-able over keys.

    Attributes:
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        regularization: lambda, as a float of `dtype`.
        plan: the public numbers of the mechanism: `linear_scale` is the scale of the noise in the
            linear term, `output_scale` is the scale of the noise on the weights, and `error` is the
            numerical error that the noise on the weights hides.
        n: the number of records.
        dims: the number of features.
        dtype: the dtype of the computation.

    Formal guarantees:
        See `learning.objective_perturbation`.
    """

    epsilon: Scalar = up()
    delta: Scalar = up()
    regularization: Scalar
    plan: PerturbationPlan
    n: int = static()
    dims: int = static()
    dtype: np.dtype = static()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release."""
        return Guarantee(self.epsilon, self.delta)

    def __call__(self, key: Key, database: Database, *, name: str | None = None) -> Release:
        """Releases the weights of a database.

        Args:
            key: a typed key from `dpjax.random.secure_key`, used for nothing else. An open ledger
                records it as used.
            database: {"x": (n, dims) features, "y": (n,) labels, positive or not}. Feature vectors
                outside of the unit ball are scaled to norm 1, and NaN counts as 0.
            name: the name of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

        Returns:
            A `Release` of the weights, shape (dims,).

        Raises:
            TypeError: if the key is not a typed key, the name is not a string, or the database does
                not contain real arrays.
            ValueError: if the database has other arrays or shapes, dtype is float64 but JAX's x64
                is off, or `vmap` maps over databases but not over keys.
            BudgetExceededError: if an open `dpjax.Ledger` has too little left.
        """
        check_key(key)
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(self)):
            raise ValueError("this must be a single training, got a batch: map over it by jax.vmap")
        _dtype_that_runs(self.dtype)
        records = self._records(database)
        draw = functools.partial(_released, self)
        return pay_and_draw(
            lambda: draw(key, records),
            key,
            (self, records),
            guarantee=guarantee_under(key, self.guarantee),
            what="objective perturbation",
            name=name,
            request=lambda name: request_of(name, draw, key, TreeSpec.of(records), self),
        )

    def _records(self, database: Database) -> dict[str, jax.Array]:
        """Checks the structure of a database, and returns its features and labels.

        Only structure, dtypes and shapes decide whether the database is refused.
        """
        found, _ = record_arrays("database", database)
        wanted = {"x": (self.n, self.dims), "y": (self.n,)}
        # The structures are compared first. A column of texts is a pytree node, and its comparison
        # with a shape would raise an error.
        has_arrays = jax.tree.structure(found) == jax.tree.structure({"x": 0, "y": 0})
        if not has_arrays or jax.tree.map(jnp.shape, found) != wanted:
            raise ValueError(
                f"database must be arrays of shapes {wanted}, got {_checks.described(found)}"
            )
        records: dict[str, jax.Array] = found
        cast = _checks.saturating_cast if is_float(records["x"]) else jnp.asarray
        return {**records, "x": cast(records["x"], self.dtype)}

    def __repr__(self) -> str:
        return f"ObjectivePerturbation({self.guarantee!r}; n={self.n}, dims={self.dims})"


def _dtype_that_runs(dtype: jax.typing.DTypeLike) -> np.dtype:
    running = running_dtype(dtype)
    if running.itemsize < np.dtype(dtype).itemsize:
        raise ValueError(f"dtype={dtype} needs jax.config.update('jax_enable_x64', True)")
    return running


@jax.jit
def _released(training: ObjectivePerturbation, key: Key, records: Database) -> jax.Array:
    plan, dtype = training.plan, training.dtype
    key_linear, key_output = jax.random.split(key_for_each(key, records))
    of_linear, of_output = calibrations(plan, training.dims, dtype)
    linear = add_noise(key_linear, jnp.zeros(training.dims, dtype), of_linear, GAUSSIAN)
    x = into_unit_ball(records["x"])
    rows = jnp.where((records["y"] > 0)[:, None], x, -x)
    regularization = jnp.asarray(training.regularization).astype(dtype)
    weights = perturbed_minimizer(rows, linear / training.n, regularization, plan.solver)
    return add_noise(key_output, weights, of_output, GAUSSIAN)


def objective_perturbation(
    *,
    regularization: float,
    n: int,
    dims: int,
    epsilon: float,
    delta: float,
    dtype: jax.typing.DTypeLike = "float32",
) -> ObjectivePerturbation:
    """Private L2-regularized logistic regression, by a random linear term in the objective.

    Minimizes (1/n) sum_i log(1 + exp(-y_i w'x_i)) + (lambda / 2) ||w||^2 + b'w / n for Gaussian b,
    with x_i scaled into the unit ball. A little noise on w hides the numerical error E of the
    solver (approximate minima perturbation). The term b'w / n changes the minimizer less in
    directions in which the loss is curved. So w is more accurate than with output perturbation for
    the global sensitivity bound of `targets.logistic_regression`. No sensitivity is sampled, so no
    oracle is needed, and gamma is 0.

    In float32 and for n above about 10^4, the noise on w has a larger effect than b. In this case,
    use float64.

    Args:
        regularization: lambda, above 1 / (4 n (e^epsilon - 1)).
        n: the number of records, public.
        dims: the number of features, at least 1. Append a constant feature for an intercept.
        epsilon: finite, above 0.
        delta: in (0, 1), and above the cost of the noise tables, about 1e-35 dims e^epsilon.
        dtype: the dtype of the computation; float64 needs JAX's x64.

    Returns:
        An `ObjectivePerturbation`: `training(key, database)` releases w, shape (dims,). Its `plan`
        contains the scales of the noise, which are public.

    Raises:
        TypeError: if a parameter is not a number, or dtype is not a float dtype.
        ValueError: if a parameter is out of range; if lambda is too small for epsilon and n or for
            the dtype; if no grid can represent the noise; or if dtype is float64 but x64 is off.

    Formal guarantees:
        (epsilon, delta)-DP under replace-one, for any records, and for the actual draws and
        computations. The proof is in `docs/proofs/objective-perturbation.md`. The determinants of
        the neighbors' Hessians differ by a factor of at most 1 + 1 / (4 n lambda). The change of
        the gradient depends on b through w, so the proof bounds its product with b for the worst
        records. For any data, w is within E of the exact minimizer: after Newton's method, gradient
        steps bring any point within E. The noise on w covers E and the rounding of b. All noise is
        exact integer noise. Pure DP is impossible in this way, because no E is valid for every b.

    Source:
        Chaudhuri, Monteleoni and Sarwate (2011), Algorithm 2, with the determinant of one record
        instead of two, and Gaussian noise; Kifer, Smith and Thakurta (2012), who treat b'v as
        normal, which does not hold, as Redberg, Koskela and Wang (2023) say; Iyengar, Near, Song,
        Thakkar, Thakurta and Wang (2019), for approximate minima.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> training = dpjax.learning.objective_perturbation(
        ...     regularization=0.1, n=100, dims=2, epsilon=1.0, delta=1e-5
        ... )
        >>> records = {"x": jnp.ones((100, 2)), "y": jnp.ones(100)}
        >>> training(dpjax.random.secure_key(), records).guarantee
        (epsilon=1, delta=1e-05)-DP, under replace-one
    """
    running = _dtype_that_runs(dtype)
    n = _checks.integer("n", n, least=1)
    dims = _checks.integer("dims", dims, least=1)
    regularization = float(np.asarray(check_strength(regularization), running))
    check_carried(regularization, dims, running)
    epsilon, delta = _checks.positive("epsilon", epsilon), _checks.fraction("delta", delta)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        _checks.host_only(name, value, "several trainings, each made outside")
    plan = perturbation_plan(
        regularization, n=n, d=dims, epsilon=epsilon, delta=delta, dtype=running
    )
    return made(ObjectivePerturbation, epsilon, delta, regularization, plan, n, dims, running)


# A bound on the distance between the gradients of two records in the unit ball. The norm of each
# gradient is below 1.
_REACH = 2.0
# A ball of this radius restricts nothing. The bound on the slope of a record's loss is 1, and
# arbitrary weights have the same bound.
_ANY_BALL = 1e9
# The fraction of delta that is reserved for the event that the norm of the noise b exceeds the
# bound B. The proof uses the same fraction.
_LONGER = 1e-6
# The ends of the intervals of the random variable Y (see `_pull_within`). The proof needs the
# expectation of a function of Y, and `_delta_of` bounds it by a sum over these intervals.
_INTERVALS = np.linspace(0.0, 14.0, 4001)
# The bound on the effect of one record depends on two angles, f and a. The range of f (see
# `_pull_within`), from 0 to pi / 2, is divided into `_SECTORS` intervals. The range of a (see
# `_both_pulls`) is divided into `_ANGLES` - 1 intervals.
_SECTORS, _ANGLES = 128, 1000
# This factor covers the rounding errors of the float64 computations in this file.
_OUTWARD = 1 + 1e-9
# The largest number of steps that the solver may take. In all tests a few steps of Newton's method
# were enough, but the proof does not show this. The steps are counted in float32, which is exact
# below 2^24.
_MOST_STEPS = 1e7
# Before its increase for rounding to the grid, the scale of the drawn noise is at most this factor
# times the planned scale.
_DRAWN = 1 + 2.0**-10
assert GAUSSIAN.lattice is not None
_LATTICE = GAUSSIAN.lattice


def perturbation_plan(
    regularization: float, *, n: int, d: int, epsilon: float, delta: float, dtype: np.dtype
) -> PerturbationPlan:
    """Returns the plan with the least noise that the proof allows.

    The budget mu^2 = mu_1^2 + mu_2^2 of Gaussian DP is split between two noises. The first noise is
    in the linear term of the objective. It acts about like noise that is added to the weights for a
    sensitivity of 2 / (n lambda). The second noise is added to the weights. It covers the error E
    of the solver, so its sensitivity is 2 E. The variance is least if the fractions of mu^2 are
    proportional to these two sensitivities.
    """
    left_epsilon, left_delta = _left_by_tables(epsilon, delta, d)
    left_epsilon -= math.log1p(1 / (4 * n * regularization)) * _OUTWARD
    if not left_epsilon > 0:
        least = 1 / (4 * n * math.expm1(epsilon))
        raise ValueError(
            f"regularization must be above {least:.3g} for epsilon={epsilon:g} and n={n}: at"
            f" {regularization:g} the curvature of one record alone costs more than epsilon"
        )

    def planned(share: float, ball: float) -> PerturbationPlan:
        """Returns the plan that spends `share` of mu^2 on the weights, for radius `ball`."""
        pull, tails = _pull_within(ball)
        mu = _largest_mu(left_epsilon, left_delta, share, tails)
        sigma = pull / (mu * math.sqrt(1 - share))
        grid, longest, eps = _grid(sigma, d), _longest(sigma, d, delta), float(unit(dtype))
        # Bounds the rounding error of b, which is drawn on a grid and then divided by n in floats.
        rounding = grid * math.sqrt(d) + 2 * eps * longest
        linear = (longest + rounding) / n
        solver, solved = solver_plan(regularization, pull=linear, d=d, eps=eps)
        error = (solved + rounding / (n * regularization)) * _OUTWARD
        return PerturbationPlan(sigma, 2 * error / (mu * math.sqrt(share)), error, pull, solver)

    # The error E depends on sigma, and sigma depends on the share. So the share is computed from
    # the error E of a preliminary plan. Every share gives the same guarantee; only the variance
    # depends on it.
    error = float(planned(0.5, _ANY_BALL).error)
    share = error / (error + 1 / (n * regularization))
    # D, the bound on the difference of two records' gradients, depends on the radius W of a ball
    # that contains the minimizer, and W depends on sigma. So the first plan assumes no bound on W.
    # It has more noise than the final plan, so its ball also contains the minimizer of the final
    # plan. Rounding in the discretized bounds might make the final ball larger, so the two radii
    # are compared.
    first = planned(share, _ANY_BALL)
    plan = planned(share, float(first.solver.radius))
    plan = plan if plan.solver.radius <= first.solver.radius else first
    if plan.solver.most_steps > _MOST_STEPS:
        raise ValueError(
            f"regularization={regularization:g} is too small: the solver might take "
            f"{plan.solver.most_steps:.2g} steps, which is more than the limit of {_MOST_STEPS:g}"
        )
    for calibration in calibrations(plan, d, dtype):
        if not calibration.fits(_LATTICE, dtype):
            raise ValueError(f"no grid of {dtype} can hold the noise at epsilon={epsilon:g}")
    return plan


def calibrations(
    plan: PerturbationPlan, d: int, dtype: np.dtype
) -> tuple[Calibration, Calibration]:
    """Returns the calibrations of both noises: the noise b, and the noise on the weights."""
    shape = math.sqrt(d), d, False, dtype
    # A `Calibration` with a finite epsilon reserves a part of it for the errors of noise tables.
    # The plan has already done this (see `_left_by_tables`), so epsilon is infinite here.
    return (
        Calibration(plan.linear_scale, _REACH, math.inf, *shape),
        Calibration(plan.output_scale, 2 * plan.error, math.inf, *shape),
    )


def _left_by_tables(epsilon: float, delta: float, d: int) -> tuple[float, float]:
    """Returns what is left of epsilon and delta after two costs.

    One cost is for the errors of the tables from which noise is drawn. The other cost is for the
    event that the norm of the noise b exceeds the bound B.
    """
    certificate = _LATTICE.certificate
    loss, missed = 2 * d * certificate.loss, 2 * d * certificate.delta
    outside = missed * (1 + math.exp(min(epsilon, 700.0)))
    left = delta * (math.exp(-loss) / _OUTWARD - _LONGER) - outside * _OUTWARD
    if not left > delta / 2:
        raise ValueError(
            f"delta={delta!r} is too small for epsilon={epsilon:g} and {d} features: the errors"
            f" of the noise tables alone cost a delta of {outside:.2g}"
        )
    return epsilon - 2 * loss, left


def _largest_mu(epsilon: float, delta: float, share: float, tails: np.ndarray) -> float:
    """Returns the largest mu for which the release is (epsilon, delta)-DP.

    The noise on the weights gets the fraction `share` of mu^2. The logarithm of mu is bisected. The
    mu of a Gaussian mechanism is the upper end of the search.
    """
    high = -math.log(float(analytic_multiplier(epsilon, delta)))
    low = least = high - 3
    for _ in range(40):
        middle = (low + high) / 2
        exceeds = _delta_of(math.exp(middle), epsilon, share, tails) * _OUTWARD > delta
        low, high = (low, middle) if exceeds else (middle, high)
    if low == least:
        raise ValueError(f"epsilon={epsilon:g} is too small for delta={delta:g}")
    return math.exp(low) / _OUTWARD


def _delta_of(mu: float, epsilon: float, share: float, tails: np.ndarray) -> float:
    """Returns an upper bound on the expectation of H(mu_2, epsilon - mu_1^2 / 2 - mu_1 Y).

    H(mu, e) is the delta of a Gaussian mechanism with parameter mu at epsilon e. mu_2^2 is the
    fraction `share` of mu^2, and mu_1^2 is the rest. Y is the random variable of `_pull_within`.
    `tails` contains an upper bound on P(Y > y) for each y in `_INTERVALS`.
    """
    first, second = mu * math.sqrt(1 - share), mu * math.sqrt(share)
    left = epsilon - first**2 / 2 - first * _INTERVALS[1:]
    one = scipy.special.ndtr(second / 2 - left / second)
    other = np.exp(left + scipy.special.log_ndtr(-second / 2 - left / second))
    # `divergence` bounds H (see the docstring) on each interval of the random variable Y. H grows
    # with Y, so it is largest at the upper end of the interval. The last interval has no upper end,
    # and there H is bounded by 1. If `one` and `other` nearly cancel, the rounding errors are large
    # relative to the difference, so a bound on these errors is added.
    divergence = np.maximum(one - other, 0) + 1e-10 * one
    return float((tails[:-1] - tails[1:]) @ divergence + tails[-1])


@functools.lru_cache(maxsize=64)
def _pull_within(radius: float) -> tuple[float, np.ndarray]:
    """Bounds the effect of one record, for weights of norm up to `radius`.

    Let v be the gradient of one record's loss minus that of another record's loss. Let sigma be the
    scale of the noise b. The number D bounds the norm of v. The random variable Y bounds b'v /
    (sigma D). Returns D, and an upper bound on P(Y > y) for each y in `_INTERVALS`.

    Project b / sigma to a plane that contains both records. Let R be the length of the projection.
    Let f be the angle between the projection and the bisector of the first record and the negative
    of the second record. Then Y = R T(f) / D. For f in [0, pi/2), T(f) is the larger of two
    numbers: F(f) (see `_both_pulls`) and the largest slope of a loss. For larger f, T(f) is the
    largest slope. T decreases on [0, pi/2). So T at the smallest angle of a sector bounds T in the
    sector.
    """
    largest = float(scipy.special.expit(radius))
    sectors = np.arange(_SECTORS) * (math.pi / 2 / _SECTORS)
    reach = np.maximum([_both_pulls(f, radius) for f in sectors], largest)
    share = (reach[0] / np.append(reach, np.full(_SECTORS, largest))) ** 2
    tails = np.mean(np.exp(-np.outer(_INTERVALS**2 / 2, share)), axis=1)
    return float(reach[0]) * _OUTWARD, tails


def _both_pulls(f: float, radius: float) -> float:
    """Returns F(f), for a bound on the inner product of noise b and a change v of the gradient.

    v has two terms: the gradient of the first record's loss, and the negative gradient of the
    second record's loss. Let sigma be the scale of b. Project b / sigma to a plane that contains
    both records. The projection has length R and angle f (see `_pull_within`). If both terms of v
    increase b'v, then F(f) bounds b'v / (sigma R).

    Let 2 a be the angle between the first record and the negative of the second record. F(f) is the
    maximum over a of 2 cos(a) cos(f) s(u), where u = radius sin(a) / cos(f), and s is
    `_slope_envelope`. The range of a is split into intervals. cos(a) decreases, so it is taken at
    the lower end of each interval. s(u) increases, so it is taken at the upper end.
    """
    angles = np.linspace(0, math.pi / 2 - f, _ANGLES)
    margins = np.minimum(radius * np.sin(angles[1:]) / math.cos(f), radius)
    return float(np.max(2 * np.cos(angles[:-1]) * math.cos(f) * _slope_envelope(margins, radius)))


def _slope_envelope(u: np.ndarray, radius: float) -> np.ndarray:
    """Returns a concave upper bound on s(u) = max_x x / (1 + exp(-x u)), at u >= 0.

    Here x is in [0, 1]. For u >= 0, s is the sigmoid, which is concave. For u <= 0, s is convex, so
    a line is above s on [-radius, 0] if it is above s at both ends. So a line bounds s on [-radius,
    radius] if it is above s at -radius, and above the sigmoid for u >= 0. A tangent of the sigmoid
    is such a line if it is above s at -radius.
    """
    sigmoid = scipy.special.expit(u)
    least = scipy.special.expit(-radius) if radius < 1.27 else _LARGEST_PULL / radius
    tangent_start = sigmoid - sigmoid * (1 - sigmoid) * (u + radius)
    ends = np.linspace(0, min(radius, 40.0), 4001)
    steepest = np.max((scipy.special.expit(ends[1:]) - least) / (ends[:-1] + radius))
    steepest = max(steepest, (1 - least) / (ends[-1] + radius)) if radius > 40 else steepest
    line = np.minimum(least + steepest * (u + radius), scipy.special.expit(radius))
    return np.where(tangent_start >= least, sigmoid, line)


def _longest(sigma: float, d: int, delta: float) -> float:
    """Returns B. The norm of the drawn noise exceeds B only with negligible probability."""
    drawn = sigma * _DRAWN * (1 + math.sqrt(d) * _grid(sigma, d) / _REACH)
    return drawn * (math.sqrt(d) + math.sqrt(-2 * math.log(_LONGER * delta))) + _REACH


def _grid(sigma: float, d: int) -> float:
    """Returns an upper bound on the spacing of the grid on which the noise b is drawn.

    `Calibration` rounds a spacing to a power of two. The bound is twice the spacing before
    rounding.
    """
    balanced = math.sqrt(sigma / _REACH * math.sqrt(d) / _LATTICE.resolution)
    return 2 * _REACH * max(balanced, 2.0**-17) / math.sqrt(d)


# The solver of the perturbed objective. Thirty Newton steps with a line search reduce the gradient
# to its rounding error. (Damped steps are too short: noise may move weights by hundreds of units
# along features that are nonzero in few records.) Gradient steps follow; see `walk_to_minimizer`.
# The proof bounds the error for any result of the Newton steps.

_NEWTON_STEPS = 30
# The line search of a Newton step bisects the logarithm of the step size. This is the number of
# bisections.
_HALVINGS = 8
# The largest second derivative of the logistic loss along a unit vector.
_CURVATURE = 1 / 4
# An upper bound on m / (1 + exp(m)) for all margins m.
_LARGEST_PULL = 0.2785


def solver_plan(
    regularization: float, *, pull: float, d: int, eps: float
) -> tuple[WalkPlan, float]:
    """Returns a plan of the solver for any linear term whose norm is at most `pull`, and its error.

    The error is a bound on the distance of the computed weights from the exact minimizer.
    """
    root = (pull + math.sqrt(pull**2 + 4 * regularization * _LARGEST_PULL)) / (2 * regularization)
    radius = min((1 + pull) / regularization, root) * (1 + 1e-12)
    # The rounding error of the gradient at weights in the ball, in units of eps. A product r'w has
    # an error of at most d times the norm of w. The sigmoid has a slope of at most 1/4, so at most
    # a quarter of this error remains. The roundings of the sigmoid, of its product with a row, and
    # of the average add at most 6. The average is rounded to a grid. This adds at most 1/8 in each
    # coordinate. The gradient is lambda w minus the average plus the linear term. The linear term
    # has a norm of at most `pull`. None of these vectors is longer than 2 + 2 pull. So the
    # roundings of lambda w, of the linear term and of the two sums add 6 (1 + pull).
    error = eps * ((d + 1) * radius / 4 + 6 + d / 8 + 6 * (1 + pull))
    # Counts the rounding errors of the projection (length, quotient, product) and of a gradient
    # step (product, sum).
    rounding = eps * radius * (d / 2 + 8) + eps * (1 + pull) / regularization
    plan = walk_plan(regularization, curvature=_CURVATURE, radius=radius, gradient_error=error)
    return plan, walk_error(
        regularization, curvature=_CURVATURE, gradient_error=error, rounding=rounding
    )


def perturbed_minimizer(
    rows: jax.Array, pull: jax.Array, regularization: Scalar, plan: WalkPlan
) -> jax.Array:
    """The weights w that minimize mean(log(1 + exp(-rows w))) + lambda ||w||^2 / 2 + pull'w.

    Args:
        rows: shape (n, d), each with norm at most 1.
        pull: shape (d,), with norm at most the plan's bound.
        regularization: lambda, a number of the dtype of the rows.
        plan: made for these parameters.

    Returns:
        The weights, shape (d,). Their distance to the minimizer is at most the error that
        `solver_plan` returns.
    """

    def length_of(step: jax.Array, w: jax.Array) -> jax.Array:
        """Returns the fraction of a step to take: 1 if the objective falls along the whole step."""
        margins, moved = rows @ w, rows @ step
        pulled = regularization * (w @ step) + pull @ step

        def falls_at(t: jax.Array) -> jax.Array:
            pushed = jnp.mean(jax.nn.sigmoid(t * moved - margins) * moved)
            return pulled - t * regularization * (step @ step) >= pushed

        def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = jnp.sqrt(low * high)
            falls = falls_at(middle)
            return jnp.where(falls, middle, low), jnp.where(falls, high, middle)

        whole = jnp.ones((), rows.dtype)
        low = lax.fori_loop(0, _HALVINGS, halve, (damping(moved), whole))[0]
        return jnp.where(falls_at(whole), whole, low)

    def wrong_and_gradient(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        wrong, gradient = logistic_gradient(rows, w, regularization)
        return wrong, gradient + pull

    def newton_step(_: jax.Array, w: jax.Array) -> jax.Array:
        wrong, gradient = wrong_and_gradient(w)
        step = logistic_step(rows, wrong, gradient, regularization)
        return w - length_of(step, w) * step

    with jax.default_matmul_precision("highest"):
        found = lax.fori_loop(0, _NEWTON_STEPS, newton_step, jnp.zeros(rows.shape[1], rows.dtype))
        return walk_to_minimizer(
            lambda w: wrong_and_gradient(w)[1],
            found,
            step_size=1 / (regularization + _CURVATURE),
            plan=plan,
        )
