"""Permute-and-flip, which improves on the exponential mechanism."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.typing import ArrayLike

from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._selection import SelectionMechanism, SelectionRule, select_by
from dpjax.random._facade import float_index, permute_and_flip_index

_NODES = 12  # In each interval between two powers of two.


@functools.lru_cache
def _rule(options: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes t in (0, 1), 1 - t, and weights: for the products that `_log_pmf` integrates.

    Relative errors are below 2^-40, docs/proofs/privacy-profile.md.
    """
    halvings = (options - 1).bit_length()
    # The product has degree options - 1, and half as many nodes are exact.
    ends, count = np.array([0.0, 1.0]), -(-options // 2)
    if count > _NODES * (1 + halvings):
        ends, count = np.append(0.0, 0.5 ** np.arange(halvings, -1, -1)), _NODES
    nodes, weights = scipy.special.roots_legendre(count)
    half = np.diff(ends)[:, None] / 2
    from_0 = ends[:-1, None] + half * (1 + nodes)
    to_1 = 1 - ends[1:, None] + half * (1 - nodes)  # Near 1, a difference would lose digits.
    return from_0.ravel(), to_1.ravel(), (half * weights).ravel()


def _log_pmf(logits: jax.Array) -> jax.Array:
    """Log of p_i * integral_0^1 prod_{j != i} (1 - t p_j) dt, with p_j = exp(logit_j).

    No factor cancels: in float32, K options cost K * 2^-21 at most.
    """
    logits = logits - jnp.max(logits)
    absent = 1 - jnp.minimum(jnp.exp(logits), 1)

    # One node after the other: products of all of them take too much memory in a batch.
    def add(total: jax.Array, node: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        t, rest, weight = node
        factors = rest + t * absent
        return total + weight * jnp.prod(factors) / factors, None

    rule = tuple(jnp.asarray(x, logits.dtype) for x in _rule(logits.size))
    # Zero, but varying over devices as the logits do: a loop under `shard_map` starts with that.
    total, _ = lax.scan(add, 0 * absent, rule)
    return logits + jnp.log(total)


PERMUTE_AND_FLIP_RULE = SelectionRule(
    name="permute-and-flip",
    draw=permute_and_flip_index,
    draw_in_floats=partial(float_index, flip=True),
    log_pmf=_log_pmf,
)


def permute_and_flip(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    noise: NoiseKind = "exact",
    log_base: ArrayLike | None = None,
) -> SelectionMechanism:
    """Permute-and-flip: visits responses in random order, keeps r with probability p_r.

    p_r = exp(epsilon (score_r - best) / (2 Delta)). The same distribution has the largest of
    epsilon score_r / (2 Delta) plus one-sided exponential noise, which is drawn. The expected gap
    is at most that of the exponential mechanism, and can be half of it.

    Args:
        sensitivity: as for `exponential`.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.
        log_base: as for `exponential`: 2 Delta / epsilon times it counts as a part of the scores.

    Returns:
        A `SelectionMechanism`, as `exponential` does.

    Raises:
        TypeError: as for `exponential`.
        ValueError: as for `exponential`.

    Formal guarantees:
        Those of `exponential`.

    Source:
        McKenna and Sheldon (2020), Theorem 1; Ding et al. (2021) for report-noisy-max.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.permute_and_flip(1.0, epsilon=1.0)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.array([1000.0, 5.0, 0.0]))
        >>> int(release.value)
        0
    """
    return select_by(PERMUTE_AND_FLIP_RULE, sensitivity, epsilon, noise, log_base)
