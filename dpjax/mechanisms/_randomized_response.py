"""Mechanisms of local differential privacy: randomized response and unary encoding."""

import abc
import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._pytree import made, made_by_factory, static
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Scalar
from dpjax._exact._numerics import is_float
from dpjax.mechanisms._start import begin, count, sum_over_leaves
from dpjax.random._release import flipped_one_hot, in_range, keep_or_lie
from dpjax.release._mechanism import SensitivityMechanism


class LocalMechanism(SensitivityMechanism):
    """A mechanism on arrays with one answer per person, which randomizes each answer separately."""

    categories: int

    @property
    @abc.abstractmethod
    def report_weights(self) -> tuple[int, int]:
        """Returns the probability of the true category and of each other category, times 2^32."""

    @abc.abstractmethod
    def _draw_answers(self, key: Key, answers: jax.Array) -> jax.Array:
        """Draws the randomized reports for an array of answers."""

    @abc.abstractmethod
    def _most_lies(self, confidence: float, answers: int) -> float:
        """Bounds the number of lies in `answers` reports, at a confidence."""

    def _draw(self, key: Key, value: Value) -> Value:
        leaves, structure = jax.tree.flatten(value)
        keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
        return jax.tree.map(self._draw_answers, jax.tree.unflatten(structure, keys), value)

    def _check_value(self, value: Value) -> None:
        for leaf in jax.tree.leaves(value):
            if is_float(leaf):
                raise TypeError(f"value must hold integer categories, got dtype {leaf.dtype}")

    def lies(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> int:
        """A bound on the number of lies, for one answer or simultaneously for all, at a confidence.

        Args:
            confidence: the bound holds with at least this probability; in (0, 1).
            shape: shape of the value.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.
            simultaneous: whether to count the lies in all answers, instead of in one answer.

        Returns:
            An integer. For bits, a lie is a bit that differs from the truth.
        """
        confidence = _checks.fraction("confidence", confidence)
        if like is None:
            answers = count(() if shape is None else shape)
        elif shape is not None:
            raise ValueError(
                f"`like` already determines shapes and dtypes: leave out shape={shape}"
            )
        else:
            value = _checks.real_shapes("like", like)
            self._check_value(value)
            answers = sum(leaf.size for leaf in jax.tree.leaves(value))
        return int(self._most_lies(confidence, answers if simultaneous else 1))

    def clamped(self, value: Value) -> Value:
        """The answers, clamped to [0, categories).

        Args:
            value: a pytree of integers.

        Returns:
            A pytree of the same structure and shapes. It is private data, like the value itself.
        """
        value = _checks.real_arrays("value", value)
        return jax.tree.map(lambda x: in_range(x, self.categories), value)


Weight: TypeAlias = np.uint32 | jax.Array
_MOST_CATEGORIES = 2**15
_MOST_EPSILON = 22.0


@made_by_factory
class RandomizedResponse(LocalMechanism):
    """Keeps each answer or lies about it; made by `randomized_response` or `two_coins`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one answer changes.
        epsilon: the epsilon of the guarantee.
        lie_weight: each false answer has probability lie_weight / 2^32.
        categories: number of possible answers.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    lie_weight: Weight
    categories: int = static()

    @property
    def report_weights(self) -> tuple[int, int]:
        lie = int(self.lie_weight)
        return 2**32 - (self.categories - 1) * lie, lie

    def _draw_answers(self, key: Key, answers: jax.Array) -> jax.Array:
        return keep_or_lie(key, answers, self.lie_weight, self.categories)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        weight = jnp.asarray(self.lie_weight).astype(jnp.float32)
        weight = jnp.where(weight == 0, jnp.nan, weight) / 2.0**32

        def answer(y: jax.Array, x: jax.Array) -> jax.Array:
            truth = in_range(x, self.categories)
            log_truth = jnp.log1p(-(self.categories - 1) * weight)
            y = jnp.asarray(y).astype(float)
            chosen = jnp.where(y == truth.astype(float), log_truth, jnp.log(weight))
            possible = (y >= 0) & (y < self.categories) & (y == jnp.round(y))
            return jnp.sum(jnp.where(possible, chosen, -jnp.inf))

        return sum_over_leaves(answer, output, _checks.real_arrays("value", value))

    def _most_lies(self, confidence: float, answers: int) -> float:
        lying = (self.categories - 1) * (np.asarray(self.lie_weight, float) / 2.0**32)
        return scipy.stats.binom.ppf(confidence, answers, lying)

    @property
    def dp_event(self) -> Any:
        """The event of one answer, for accountants under the relation `REPLACE_ONE`.

        Under `REPLACE_SPECIAL`, dp-accounting computes the cost of removing an answer, which is
        smaller. For a repeated event, dp-accounting ignores the number of repetitions, so compose
        one event at a time.
        """
        accounting = _checks.extra("dp_accounting", "accounting")
        resampled = self.categories / (math.exp(float(self.epsilon)) + self.categories - 1)
        return accounting.RandomizedResponseDpEvent(resampled, self.categories)


def randomized_response(epsilon: Scalar, categories: int = 2) -> RandomizedResponse:
    """Randomized response: the truth with probability e^eps / (e^eps + K - 1), else a uniform lie.

    Each lie has probability 1 / (e^eps + K - 1), rounded up to a multiple of 2^-32. So the truth is
    at most e^eps times as likely as a lie. One random 32-bit word determines the answer, without
    floating-point arithmetic.

    Args:
        epsilon: above 0, at most 22.
        categories: K, the number of possible answers, from 2 to 2^15.

    Returns:
        A `RandomizedResponse`: `mechanism(key, answers)` takes integer arrays of categories in
        [0, K), of any shape, and releases int32. Answers out of range are clamped.

    Raises:
        TypeError: if epsilon is not a number or K not an integer; at a release, if the answers
            are not integers.
        ValueError: if one of them is out of range, or epsilon is too small for K (below K^2 2^-32).

    Formal guarantees:
        epsilon-DP when one answer changes. Each entry of a value must be the answer of a different
        person. A person who gives t answers has only t epsilon-DP. With `dpjax.privatize`, you
        promise that one record of the database changes at most one entry of the target's value. The
        guarantee is exact given uniform random bits.

    Source:
        Warner (1965); Kairouz, Bonawitz and Ramage (2016) for K categories.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.randomized_response(1.0, categories=4)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.arange(4))
        >>> release.value.shape
        (4,)
    """
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    epsilon = within_a_word(epsilon)
    size = _checks.integer("categories", categories, least=2, most=_MOST_CATEGORIES)
    return made(RandomizedResponse, sensitivity, epsilon, lie_weight_of(epsilon, size), size)


def two_coins(categories: int = 2) -> RandomizedResponse:
    """The two-coin protocol: report the truth on tails, and a uniformly random answer on heads.

    The truth has probability 1/2 + 1/(2 K), and each lie has probability 1/(2 K), rounded up to a
    multiple of 2^-32. This is randomized response at epsilon ln(K + 1). For K = 2 a second coin
    chooses the random answer, and epsilon is ln 3.

    Args:
        categories: K, the number of possible answers, from 2 to 2^15.

    Returns:
        A `RandomizedResponse`.

    Raises:
        TypeError: if K is not an integer.
        ValueError: if K is out of range.

    Formal guarantees:
        As for `randomized_response` at epsilon = ln(K + 1), rounded up. If K is a power of two, the
        probabilities are exactly those of fair coins.

    Source:
        Warner (1965); Dwork and Roth (2014), section 3.2, for K = 2.

    Example:
        >>> import dpjax
        >>> round(dpjax.two_coins().guarantee.epsilon, 4)
        1.0986
    """
    size = _checks.integer("categories", categories, least=2, most=_MOST_CATEGORIES)
    sensitivity, epsilon = begin("hamming", 1.0, math.nextafter(math.log(size + 1), math.inf))
    return made(RandomizedResponse, sensitivity, epsilon, np.uint32(-(-(2**31) // size)), size)


def within_a_word(epsilon: Scalar) -> Scalar:
    """Refuses an epsilon above 22, or replaces it by NaN if it is traced."""
    if _checks.is_traced(epsilon):
        return jnp.where(epsilon <= _MOST_EPSILON, epsilon, jnp.nan)
    if epsilon > _MOST_EPSILON:
        raise ValueError(
            f"epsilon must be at most {_MOST_EPSILON}, got {epsilon:g}: the probability of a false"
            " answer is a multiple of 2^-32, and these multiples are too coarse for a larger"
            " epsilon"
        )
    return epsilon


def lie_weight_of(epsilon: Scalar, count: int) -> Weight:
    """Returns 2^32 times the probability of each lie, rounded up; 0 if epsilon is too small.

    The result is 0 only for a traced epsilon. It is at most floor(2^32 / count), because a lie must
    not be more likely than the truth.
    """
    most = 2**32 // count
    if isinstance(epsilon, float):
        # The relative error of `exp` is below 1e-14. Rounding the weight of a lie up preserves
        # privacy.
        share = 2**32 / (math.exp(epsilon) + count - 1)
        weight = math.ceil(share * (1 + 1e-14))
        if weight > most:
            raise ValueError(
                f"epsilon={epsilon:g} is too small for {count} categories: probabilities are"
                " multiples of 2^-32, so a lie would be more likely than the truth. Take a larger"
                " epsilon"
            )
        return np.uint32(weight)
    share = 2.0**32 / (jnp.exp(jnp.asarray(epsilon).astype(jnp.float32)) + (count - 1))
    weight = (jnp.ceil(share * (1 + 2.0**-20)) + 1).astype(jnp.uint32)
    return jnp.where(jnp.isnan(epsilon) | (weight > np.uint32(most)), 0, weight).astype(jnp.uint32)


BitFlips = Literal["optimized", "symmetric"]
_MOST_BITS = 2**20


@made_by_factory
class UnaryEncoding(LocalMechanism):
    """Reports one bit for each category, after random flips; made by `unary_encoding`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one answer changes.
        epsilon: the epsilon of the guarantee.
        truth_weight: the bit of the true category is 1 with probability truth_weight / 2^32.
        lie_weight: another bit is 1 with probability lie_weight / 2^32.
        categories: number of possible answers.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

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
            # The weights of a 1 and of a 0 add up to 2^32. So in uint32 arithmetic, the weight of a
            # 0 is minus the weight of a 1.
            one, zero = (
                jnp.where(true, log_share(of_true), log_share(of_others))
                for of_true, of_others in ((truth, lie), (-truth, -lie))
            )
            y = jnp.asarray(y).astype(float)
            return jnp.sum(jnp.where(y == 1, one, jnp.where(y == 0, zero, -jnp.inf)))

        return sum_over_leaves(bits, output, _checks.real_arrays("value", value))

    def _most_lies(self, confidence: float, answers: int) -> float:
        # Half of the failure probability is for bits of true categories that become 0, and half for
        # other bits that become 1.
        each = (1 + confidence) / 2
        truth, lie = (weight / 2.0**32 for weight in self.report_weights)
        lost = scipy.stats.binom.ppf(each, answers, 1 - truth)
        return lost + scipy.stats.binom.ppf(each, answers * (self.categories - 1), lie)


def unary_encoding(
    epsilon: Scalar, categories: int, *, flips: BitFlips = "optimized"
) -> UnaryEncoding:
    """Randomized response on one-hot bits: the true category is 1, and every bit may be flipped.

    - "optimized": the bit of the true category stays 1 with probability 1/2. Each other bit becomes
      1 with probability 1 / (e^epsilon + 1).
    - "symmetric": each bit flips with probability 1 / (e^(epsilon / 2) + 1).

    `dpjax.queries.frequencies` estimates frequencies from the reports. For optimized flips, the
    variance of an estimate is about 4 e^epsilon / (n (e^epsilon - 1)^2), for any number K of
    categories. If K is above 3 e^epsilon + 2, this is less than for `randomized_response`.
    Probabilities are multiples of 2^-32, and the probabilities of flips are rounded up. There is no
    floating-point arithmetic.

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
        epsilon-DP when one answer changes, in the sense of `randomized_response`. A changed answer
        changes two bits. Let p be the probability of a 1 for the true category, and q for another
        category. The probability of a report changes by a factor of at most p (1 - q) / (q (1 -
        p)), which is at most e^epsilon. The guarantee is exact given uniform random bits.

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
    size = _checks.integer("categories", categories, least=2, most=_MOST_BITS)
    symmetric = flips == "symmetric"
    lie = lie_weight_of(epsilon / 2 if symmetric else epsilon, 2)
    truth = ~lie + np.uint32(1) if symmetric else np.uint32(2**31)
    return made(UnaryEncoding, sensitivity, epsilon, truth, lie, size)
