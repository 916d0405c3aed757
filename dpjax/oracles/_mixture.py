"""Mixtures: every record comes from one of several models, chosen by public weights."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree
from dpjax._core._types import Key, PyTree
from dpjax.oracles._choices import WeightedChoice, weighted_choice
from dpjax.oracles._independent import IndependentRecords, independent


@frozen_pytree
class Mixture(IndependentRecords):
    """Records of several oracles; `choice` picks the one that draws a record."""

    components: tuple[IndependentRecords, ...]
    choice: WeightedChoice

    def record(self, key: Key) -> PyTree:
        key_choice, key_record = jax.random.split(key)
        chosen = self.choice.draw(key_choice)
        return lax.switch(chosen, [each.record for each in self.components], key_record)

    def log_prob(self, record: PyTree) -> jax.Array:
        of_each = jnp.stack([jnp.asarray(each.log_prob(record)) for each in self.components])
        return jax.nn.logsumexp(of_each + self.choice.log_probabilities.astype(of_each.dtype))


def mixture(
    components: Sequence[IndependentRecords | Callable[[Key], PyTree]],
    weights: ArrayLike | Sequence[float],
) -> IndependentRecords:
    """An oracle that draws each record from one of several models.

    Under `vmap`, as in the sampler, every model draws, and one draw is kept.

    Args:
        components: oracles of independent records, as `dpjax.oracles` makes them, or functions
            that take a key to one record. All records have one structure, shapes and dtypes.
        weights: public, one for each component, finite and above 0. They need not add up to 1.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records. It has a `log_prob`
        if all components have, which must then be densities of one kind.

    Raises:
        TypeError: if a component is not a function, or the weights are not numbers.
        ValueError: if there is no component, if their records differ in kind, or if a weight is
            not above 0, or below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about the mixture. So components and weights must come from
        public knowledge: the share of a group among private records is a private fact. gamma covers
        the mixture as a whole, and may leave out all of a component with a small weight.
        Probabilities are within 2^-32 of the weights.

    Source:
        Rubinstein and Aldà (2017), Section 7, draws its data in this way.

    Example:
        >>> import jax
        >>> import dpjax
        >>> low = lambda key: 0.2 + 0.1 * jax.random.normal(key)
        >>> high = lambda key: 0.8 + 0.1 * jax.random.normal(key)
        >>> oracle = dpjax.oracles.mixture([low, high], weights=[0.4, 0.6])
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
    """
    if len(components) == 0:
        raise ValueError("components must hold at least one, got none")
    oracles = tuple(
        each
        if isinstance(each, IndependentRecords)
        else independent(_checks.function("components", each))
        for each in components
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    kinds = [TreeSpec.of(jax.eval_shape(each.record, key)) for each in oracles]
    for kind in kinds[1:]:
        if kind != kinds[0]:
            raise ValueError(f"components must draw records of one kind, got {kinds[0]} and {kind}")
    return Mixture(oracles, weighted_choice("weights", weights, len(oracles)))
