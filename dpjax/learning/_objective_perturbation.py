"""Linear classifiers by objective perturbation: noise in what is minimized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import MadeByFactory, TreeSpec, frozen_pytree, static, up
from dpjax._core._records import record_arrays
from dpjax._core._types import Database, Key
from dpjax._core._values import Guarantee, Release, Scalar
from dpjax.learning._perturbation_plan import PerturbationPlan, calibrations, perturbation_plan
from dpjax.learning._perturbed_minimizer import perturbed_minimizer
from dpjax.random._facade import GAUSSIAN, add_noise, check_key, key_for_each
from dpjax.release._requests import request_of
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._norms import is_float
from dpjax.targets._bounds import running_dtype
from dpjax.targets._strong_convexity import check_carried, check_strength
from dpjax.targets._unit_ball import into_unit_ball


@frozen_pytree
class ObjectivePerturbation(MadeByFactory):
    """Trains a private logistic regression: `training(key, database) -> Release`.

    Made by `learning.objective_perturbation`. Jit-able, and vmap-able over keys.

    Attributes:
        epsilon: of the guarantee.
        delta: of the guarantee.
        regularization: lambda, as a float of `dtype`.
        plan: the numbers of the mechanism: `linear_scale`, of the noise in the linear term,
            `output_scale`, of the noise on the weights, and the `error` that the latter hides.
        n: number of records.
        dims: number of features.
        dtype: of the computation.

    Formal guarantees:
        Those of the factory that made it.
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
        """What one release promises."""
        return Guarantee(self.epsilon, self.delta)

    def __call__(self, key: Key, database: Database, *, name: str | None = None) -> Release:
        """Releases the weights of a database.

        Args:
            key: a typed key from `dpjax.random.secure_key`, used for nothing else. A ledger that is
                open claims it.
            database: {"x": (n, dims) features, "y": (n,) labels, positive or not}. Features outside
                of the unit ball are scaled into it, and NaN counts as 0.
            name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

        Returns:
            A `Release` of the weights, shape (dims,).

        Raises:
            TypeError: if the key is not a typed key, the name not a text, or the database does not
                hold real arrays.
            ValueError: if the database has other arrays or shapes, dtype is float64 and JAX has
                none, or databases are mapped over by `vmap` and keys are not.
            BudgetExceededError: if an open `dpjax.Ledger` has too little left.
        """
        check_key(key)
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(self)):
            raise ValueError("training must be a single one, got a batch: map over it by jax.vmap")
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
        """Features and labels; refusals depend on structure, dtypes and shapes alone."""
        found, _ = record_arrays("database", database)
        wanted = {"x": (self.n, self.dims), "y": (self.n,)}
        # Texts are nodes, which compare with texts alone.
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
    with x_i scaled into the unit ball. A little noise on w hides the error of a solution in floats
    (approximate minima perturbation). Noise in the objective moves w less in directions in which
    the data are curved. So w is better than with noise for the global bound of
    `targets.logistic_regression` on top. No oracle, no gamma.

    The noise on w is for the error E of the solver. In float32 it dominates from n of about 10^4
    on; take float64 there.

    Args:
        regularization: lambda, above 1 / (4 n (e^epsilon - 1)).
        n: number of records, public.
        dims: number of features, at least 1. Append a constant feature for an intercept.
        epsilon: finite, above 0.
        delta: in (0, 1), and above what the tables of the noise miss, about 1e-35 dims e^epsilon.
        dtype: of the computation; float64 needs JAX's x64.

    Returns:
        An `ObjectivePerturbation`: `training(key, database)` releases w, shape (dims,). Its `plan`
        holds the scales of the noise, which are public.

    Raises:
        TypeError: if a parameter is not a number, or dtype is not one of floats.
        ValueError: if a parameter is out of range, lambda too small for epsilon and n or for the
            dtype, no grid can carry the noise, or dtype is float64 and JAX has none.

    Formal guarantees:
        (epsilon, delta)-DP under replace-one, for any records, and for the actual draws and
        computations. The proof is in `docs/proofs/objective-perturbation.md`. The determinants of
        the Hessians of neighbors differ by a factor of 1 + 1 / (4 n lambda) at most. The change of
        the gradient depends on b by way of w, so its product with b is bounded by that of the
        records. For any data, w is within E of the exact minimizer: steps along the gradient, which
        bring any point there, follow Newton's method. The noise on w covers E and the rounding of
        b. All noise is exact integer noise. Pure DP is impossible in this way, because E cannot
        hold for every b.

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
    return ObjectivePerturbation.made(epsilon, delta, regularization, plan, n, dims, running)
