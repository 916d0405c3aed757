"""Sequences of losses on which following experts is hard."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax.learning._weighted_majority import MOST_STEPS

Adversary = Literal["punish-the-likeliest", "alternating", "one-good-expert"]


def adversarial_losses(adversary: Adversary, *, steps: int, experts: int) -> jax.Array:
    """A sequence of losses against which following a leader, or exploring for long, is bad.

    - "punish-the-likeliest": the expert with the least loss so far, the first of several, errs, and
      no other. Randomized weighted majority is likeliest to follow this expert at any learning
      rate. Always following it errs at every step, and the best expert errs at one step in k.
    - "alternating": the first two experts take turns, half a step apart, so that the leader is
      always the one to err next; the others always err.
    - "one-good-expert": the last one never errs, the others always do. A low learning rate costs
      the most here: the regret comes near ln k / (eta T).

    Args:
        adversary: one of the words above.
        steps: T, at most 2^20.
        experts: k, at least 2.

    Returns:
        An array of shape (T, k), in [0, 1].

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        None: the losses are public.

    Source:
        Cesa-Bianchi and Lugosi, "Prediction, learning, and games" (2006), chapters 2 and 4.

    Example:
        >>> from dpjax import learning
        >>> learning.adversarial_losses("alternating", steps=3, experts=2).tolist()
        [[0.5, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    _checks.choice("adversary", adversary, get_args(Adversary))
    steps = _checks.integer("steps", steps, least=1, most=MOST_STEPS)
    experts = _checks.integer("experts", experts, least=2)
    turns = np.arange(steps)
    losses = np.zeros((steps, experts), np.float32)
    if adversary == "punish-the-likeliest":
        losses[turns, turns % experts] = 1
    elif adversary == "one-good-expert":
        losses[:, :-1] = 1
    else:
        losses[:, 2:] = 1
        losses[turns, turns % 2] = 1
        losses[0, 0] = 0.5
    return jnp.asarray(losses)
