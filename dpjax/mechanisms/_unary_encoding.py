"""Randomized response on one bit for each category."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._pytree import MadeByFactory, frozen_pytree, static, up
from dpjax._core._types import Key, Value
from dpjax._core._values import Scalar, Sensitivity
from dpjax.mechanisms._local_mechanism import LocalMechanism
from dpjax.mechanisms._randomized_response import Weight, lie_weight_of, within_a_word
from dpjax.mechanisms._start import begin, sum_over_leaves
from dpjax.random._facade import flipped_one_hot, in_range

BitFlips = Literal["optimized", "symmetric"]
_MOST_CATEGORIES = 2**20


@frozen_pytree
class UnaryEncoding(MadeByFactory, LocalMechanism):
    """Reports a bit for each category, and may flip each; made by `unary_encoding`.

    Attributes:
        sensitivity: one answer changes, norm "hamming".
        epsilon: of the guarantee.
        truth_weight: the bit of the true category is 1 with probability truth_weight / 2^32.
        lie_weight: another bit is 1 with probability lie_weight / 2^32.
        categories: number of possible answers.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    truth_weight: Weight
    lie_weight: Weight
    categories: int = static()

    @property
    def report_weights(self) -> tuple[int, int]:
        return int(self.truth_weight), int(self.lie_weight)

    def _draw_answers(self, key: Key, answers: jax.Array) -> jax.Array:
        weights = self.truth_weight, self.lie_weight
        return flipped_one_hot(key, answers, weights, self.categories)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        lie, truth = (jnp.asarray(x, jnp.uint32) for x in (self.lie_weight, self.truth_weight))

        def log_share(weight: jax.Array) -> jax.Array:
            share = weight.astype(jnp.float32) / 2.0**32
            return jnp.log(jnp.where(lie == 0, jnp.nan, share))

        def bits(y: jax.Array, x: jax.Array) -> jax.Array:
            true = jax.nn.one_hot(in_range(x, self.categories), self.categories, dtype=bool)
            # The weights of a 0 are minus these, modulo 2^32.
            one, zero = (
                jnp.where(true, log_share(of_true), log_share(of_others))
                for of_true, of_others in ((truth, lie), (-truth, -lie))
            )
            y = jnp.asarray(y).astype(float)
            return jnp.sum(jnp.where(y == 1, one, jnp.where(y == 0, zero, -jnp.inf)))

        return sum_over_leaves(bits, output, _checks.real_arrays("value", value))

    def _most_lies(self, confidence: float, answers: int) -> float:
        each = (1 + confidence) / 2  # For true bits that are lost, and for others that are set.
        truth, lie = (weight / 2.0**32 for weight in self.report_weights)
        lost = scipy.stats.binom.ppf(each, answers, 1 - truth)
        return lost + scipy.stats.binom.ppf(each, answers * (self.categories - 1), lie)


def unary_encoding(
    epsilon: Scalar, categories: int, *, flips: BitFlips = "optimized"
) -> UnaryEncoding:
    """Randomized response on one bit for each category, 1 for the true one; any bit may flip.

    - "optimized": the true bit stays 1 with probability 1/2. Another bit becomes 1 with probability
      1 / (e^epsilon + 1).
    - "symmetric": each bit flips with probability 1 / (e^(epsilon / 2) + 1).

    `dpjax.queries.frequencies` estimates frequencies from either. For optimized flips their
    variance is about 4 e^epsilon / (n (e^epsilon - 1)^2), for any K. With K above 3 e^epsilon + 2,
    that is less than for `randomized_response`. Probabilities are multiples of 2^-32, and those of
    lies are rounded up. There is no floating-point noise.

    Args:
        epsilon: above 0, at most 22.
        categories: K, the number of possible answers, from 2 to 2^20.
        flips: "optimized" or "symmetric".

    Returns:
        A `UnaryEncoding`: `mechanism(key, answers)` takes integer arrays of categories in [0, K),
        of any shape, and releases bits, int8, with a last axis of size K. Answers out of range are
        clamped.

    Raises:
        TypeError: if epsilon is not a number or K not an integer; at a release, if the answers
            are not integers.
        ValueError: if one of them is out of range, or epsilon is too small (below 10^-13).

    Formal guarantees:
        epsilon-DP when one answer changes, in the sense of `randomized_response`. Another answer
        changes two bits. Let p and q be the probabilities of a 1 as they are drawn, for the true
        category and for others. No report gets likelier by more than p (1 - q) / (q (1 - p)), which
        is at most e^epsilon. Exact given uniform bits.

    Source:
        Wang, Blocki, Li and Jha (2017), section 4.3; Erlingsson, Pihur and Korolova (2014) for
        symmetric flips.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.unary_encoding(1.0, categories=100)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.arange(4))
        >>> release.value.shape
        (4, 100)
    """
    _checks.choice("flips", flips, get_args(BitFlips))
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    epsilon = within_a_word(epsilon)
    size = _checks.integer("categories", categories, least=2, most=_MOST_CATEGORIES)
    symmetric = flips == "symmetric"
    lie = lie_weight_of(epsilon / 2 if symmetric else epsilon, 2)
    truth = ~lie + np.uint32(1) if symmetric else np.uint32(2**31)
    return UnaryEncoding.made(sensitivity, epsilon, truth, lie, size)
