"""The exponential mechanism."""

import jax

from dpjax.base import Scalar, Sensitivity
from dpjax.mechanisms._selection import SelectionMechanism, SelectionRule, select_by
from dpjax.random._noise import gumbel

_EXPONENTIAL = SelectionRule(name="exponential", race=gumbel, log_pmf=jax.nn.log_softmax)


def exponential(sensitivity: Sensitivity | float, epsilon: Scalar) -> SelectionMechanism:
    """The exponential mechanism: selects r with probability ~ exp(epsilon score_r / (2 Delta)).

    Drawn as the largest of epsilon score_r / (2 Delta) plus Gumbel noise. `permute_and_flip` has
    the same guarantee and never a larger expected gap.

    Args:
        sensitivity: a `Sensitivity` of the scores in the norm "linf", or a number, taken as a
            global bound in it.
        epsilon: finite, above 0.

    Returns:
        A `SelectionMechanism`: `mechanism(key, scores)` takes scores of shape (K,) and releases an
        index, int32. NaN counts as the lowest score.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if one of them is not positive and finite, or the sensitivity's norm is not
            linf; at a release, if the scores are not one array of shape (K,).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound. Assumes real arithmetic: the noise of this version is
        floating-point, see the README.

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
    return select_by(_EXPONENTIAL, sensitivity, epsilon)
