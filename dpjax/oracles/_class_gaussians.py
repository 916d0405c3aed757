"""`class_gaussians`: an oracle of labeled records, with one Gaussian for each class."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._records import public_arrays
from dpjax._core._types import Database, PyTree
from dpjax._exact._numerics import is_float
from dpjax.oracles._independent import IndependentRecords, WeightedChoice, weighted_choice


@frozen_pytree
class ClassGaussians(IndependentRecords):
    """Draws records {"x", "y"}: a label y by its frequency, then Gaussian features x given y."""

    labels: jax.Array
    choice: WeightedChoice
    means: jax.Array  # Means of the features in each class, shape (classes, d).
    deviations: jax.Array  # Their standard deviations, of the same shape.
    # Cholesky factors of the correlations, lower triangular, shape (classes, d, d).
    factors: jax.Array

    def record(self, key: jax.Array) -> dict[str, jax.Array]:
        key_class, key_noise = jax.random.split(key)
        chosen = self.choice.draw(key_class)
        classes, d = self.means.shape
        noise = jax.random.normal(key_noise, (d,), self.means.dtype)
        # One product with the factors of all classes is faster than gathering the factor of each
        # record's class.
        in_class = jax.nn.one_hot(chosen, classes, dtype=noise.dtype)[:, None] * noise[None]
        correlated = jnp.einsum("cj,cij->i", in_class, self.factors)
        x = self.means[chosen] + self.deviations[chosen] * correlated
        return {"x": x, "y": self.labels[chosen]}

    def log_prob(self, record: PyTree) -> jax.Array:
        x, y = jnp.asarray(record["x"], self.means.dtype), jnp.asarray(record["y"])
        if x.shape != self.means.shape[1:] or y.shape != ():
            raise ValueError(
                f'a record must be {{"x": {self.means.shape[1:]}, "y": ()}}, got x of shape'
                f" {x.shape} and y of shape {y.shape}"
            )
        densities = jax.vmap(_log_density, in_axes=(None, 0, 0, 0))(
            x, self.means, self.deviations, self.factors
        )
        joint = densities + self.choice.log_probabilities.astype(densities.dtype)
        return jax.nn.logsumexp(jnp.where(self.labels == y[None], joint, -jnp.inf))


def class_gaussians(
    records: Database, *, shrinkage: float | None = None, floor: float = 0.01
) -> IndependentRecords:
    """Class-conditional Gaussians, fitted to public labeled records.

    Each class gets the frequency, means, standard deviations and correlations of its records. The
    correlations R of d features are shrunk to (1 - s) R + s I. Without shrinkage, a class with at
    most d records would only draw features from a subspace. Rescaling a feature rescales its draws
    and changes nothing else.

    Args:
        records: {"x": (p, d) features, "y": (p,) labels}: public records, at least 2 of each class.
        shrinkage: s in (0, 1). By default it is the oracle-approximating shrinkage of each class,
            which is near 1 for few records and decreases like 1/p.
        floor: 0 or above. In every class, the standard deviation of a feature is at least this
            fraction of its standard deviation among all records. So a feature that is constant
            within a small class still has a density. A feature that is constant in all records
            stays constant.

    Returns:
        An oracle: `oracle(key, n)` draws a database {"x": (n, d), "y": (n,)} of independent
        records; its `log_prob` is a density in x and a probability in y.

    Raises:
        TypeError: if the records are not real arrays, x is not floats, or either is traced.
        ValueError: if they do not have these shapes, a number is NaN or infinite, a class has fewer
            than 2 records, or shrinkage or floor is out of range.

    Formal guarantees:
        A guarantee under this oracle is about the fitted Gaussians, which rarely draw outliers. It
        is not about the population that the public records came from.
        `dpjax.accounting.under_distribution_shift` bounds the difference. gamma is about all
        classes together, so all pairs with a record of a rare class may be uncovered.

    Source:
        Chen, Wiesel, Eldar and Hero (2010), Equation (23), on standardized features: the
        oracle-approximating shrinkage.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> public = {"x": jnp.array([[0.1], [0.3], [0.7], [0.9]]), "y": jnp.array([0, 0, 1, 1])}
        >>> oracle = dpjax.oracles.class_gaussians(public)
        >>> oracle(dpjax.random.seeded_key(0), 5)["x"].shape
        (5, 1)
    """
    if shrinkage is not None:
        shrinkage = _checks.fraction("shrinkage", shrinkage)
    floor = _checks.non_negative("floor", floor)
    x, y = _labeled(records)
    dtype, x64 = x.dtype, np.asarray(x, np.float64)
    labels, place, counts = np.unique(np.asarray(y), return_inverse=True, return_counts=True)
    if counts.min() < 2:
        raise ValueError(
            f"records must contain at least 2 records of every class, got {counts.min()} of "
            f"class {labels[np.argmin(counts)]}"
        )
    least = floor * _spread(x64)
    fits = [_fit(x64[place == c], least, shrinkage) for c in range(len(labels))]
    means, deviations, factors = (
        jnp.asarray(np.stack(part), dtype) for part in zip(*fits, strict=True)
    )
    choice = weighted_choice("class frequencies", counts, len(labels))
    return ClassGaussians(jnp.asarray(labels, y.dtype), choice, means, deviations, factors)


def _labeled(records: Database) -> tuple[jax.Array, jax.Array]:
    if not isinstance(records, dict) or set(records) != {"x", "y"}:
        raise ValueError(f'records must be {{"x": ..., "y": ...}}, got {_checks.shown(records)}')
    arrays, _ = public_arrays("records", records, least=2)
    x, y = arrays["x"], arrays["y"]
    if [getattr(part, "ndim", None) for part in (x, y)] != [2, 1]:
        raise ValueError(
            f'records must be {{"x": (p, d), "y": (p,)}}, got {_checks.described(arrays)}'
        )
    for part in (x, y):
        _checks.host_only("class_gaussians", part, "its oracle, made outside")
    if not is_float(x):
        raise TypeError(f'"x" must be floats, as Gaussian draws are, got dtype {x.dtype}')
    if not (np.isfinite(np.asarray(x)).all() and np.isfinite(np.asarray(y)).all()):
        raise ValueError("records must be finite")
    return x, y


def _fit(
    x: np.ndarray, least: np.ndarray, shrinkage: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the means, the standard deviations and the correlations of one class.

    The correlations are shrunk, and returned as the Cholesky factor of their matrix.
    """
    count, d = x.shape
    spread = _spread(x)
    mean = np.where(spread > 0, x.mean(axis=0), x[0])
    scaled = (x - mean) / np.where(spread > 0, spread, 1)
    correlation = scaled.T @ scaled / (count - 1)
    np.fill_diagonal(correlation, 1)
    if shrinkage is None:
        shrinkage = _oracle_approximating_shrinkage(correlation, count)
    shrunk = (1 - shrinkage) * correlation + shrinkage * np.eye(d)
    return mean, np.maximum(spread, least), np.linalg.cholesky(shrunk)


def _spread(x: np.ndarray) -> np.ndarray:
    """Returns standard deviations, which are exactly 0 if all numbers of a column are equal."""
    return np.where(np.ptp(x, axis=0) > 0, x.std(axis=0, ddof=1), 0)


def _oracle_approximating_shrinkage(correlation: np.ndarray, count: int) -> float:
    """Returns the shrinkage by equation (23) of Chen et al. (2010), for a matrix with trace d."""
    d = len(correlation)
    squares = float(np.sum(correlation**2))
    excess = squares - d  # The sum of squared correlations between different features.
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / d) * squares + d**2) / ((count + 1 - 2 / d) * excess))


def _log_density(
    x: jax.Array, mean: jax.Array, deviation: jax.Array, factor: jax.Array
) -> jax.Array:
    """Returns the log density of x in the features whose deviation is above 0.

    If a feature with deviation 0 is not equal to its mean, the result is -inf.
    """
    varies = deviation > 0
    standard = (x - mean) / jnp.where(varies, deviation, 1)
    white = jax.scipy.linalg.solve_triangular(factor, jnp.where(varies, standard, 0), lower=True)
    normal = -0.5 * (white**2 + math.log(2 * math.pi)) - jnp.log(jnp.where(varies, deviation, 1))
    constant = jnp.where(x == mean, 0.0, -jnp.inf)
    return jnp.sum(jnp.where(varies, normal, constant) - jnp.log(jnp.diagonal(factor)))
