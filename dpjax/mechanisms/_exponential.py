"""The exponential mechanism."""

from functools import partial

import jax
from jax.typing import ArrayLike

from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._selection import SelectionMechanism, SelectionRule, select_by
from dpjax.random._facade import exponential_index, float_index

EXPONENTIAL_RULE = SelectionRule(
    name="exponential",
    bounded_range=True,
    draw=exponential_index,
    draw_in_floats=partial(float_index, flip=False),
    log_pmf=jax.nn.log_softmax,
)


def exponential(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    noise: NoiseKind = "exact",
    log_base: ArrayLike | None = None,
) -> SelectionMechanism:
    """The exponential mechanism: selects r with probability ~ exp(epsilon score_r / (2 Delta)).

    A uniform r is kept with probability exp(epsilon (score_r - best) / (2 Delta)), else another one
    is drawn. So the time depends a little on the scores. `permute_and_flip` has the same guarantee,
    takes the same time for all scores, and never has a larger expected gap.

    Args:
        sensitivity: a `Sensitivity` of the scores in the norm "linf", or a number, taken as a
            global bound in it. In the norm "range", the largest change of a score minus the
            smallest, which is at most 2 linf, the exponent is epsilon score / Delta, without the 2.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.
        log_base: shape (K,), public logarithms of weights, which multiply the probabilities before
            they are normalized; -inf for a response that is never selected.

    Returns:
        A `SelectionMechanism`: `mechanism(key, scores)` takes scores of shape (K,) and releases an
        index, int32. NaN counts as the lowest score.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if one of them is not positive and finite, the sensitivity's norm is another, or
            log_base is not made of log weights; at a release, if the scores are not one array of
            shape (K,).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound. This holds for the integers that are drawn, given uniform
        bits. `effective_scale` covers the rounding of float scores. noise="float" promises nothing.
        Proofs for the range and for weights are in docs/proofs/posterior-sampler.md.

    Source:
        McSherry and Talwar (2007); Rubinstein and Aldà (2017), Corollary 13.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.exponential(1.0, epsilon=1.0)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.array([1000.0, 5.0, 0.0]))
        >>> int(release.value)
        0
    """
    return select_by(EXPONENTIAL_RULE, sensitivity, epsilon, noise, log_base)
