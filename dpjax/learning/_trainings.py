"""One key, one training: two trainings under one key share their noise, and publish a difference.

`init` of an optimizer looks pure, so programs call it again for the next fold or restart, map over
it, compile it, or send the optimizer to other processes.
"""

import collections
import itertools
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.extend.core import get_opaque_trace_state

from dpjax import _checks
from dpjax.random._keys import is_seeded
from dpjax.random._open_ledgers import fingerprint_of_key, tell_of_training

_OF_KEYS: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class Trainings:
    """Counts the trainings of one optimizer, and refuses to count where one call serves many."""

    def __init__(self, key: jax.Array | None = None) -> None:
        """Remembers the process and the trace of the optimizer."""
        self._place = os.getpid(), get_opaque_trace_state()
        self._numbers = itertools.count()
        self._numbers_of_key = itertools.count() if key is None else _numbers_of(key)

    def number(self) -> int:
        """The number of one more training, from 0."""
        if self._place != (os.getpid(), get_opaque_trace_state()):
            raise ValueError(
                "init must run where the optimizer was made, got another process, or a jit, vmap or"
                " scan that the optimizer is older than: its key would serve several trainings,"
                " whose differences were released exactly; call init outside, or make the optimizer"
                " inside, from a key of its own"
            )
        return next(self._numbers)

    def key(self, key: jax.Array) -> jax.Array:
        """The key of one more training, which ledgers of keys claim: first the given one."""
        if self.number() == 0:
            tell_of_training(key)
        if number := next(self._numbers_of_key):
            key = jax.random.fold_in(key, number)
            tell_of_training(key)
        return key

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied to other processes, which could not tell each other's counts."""
        raise TypeError(
            "an optimizer that adds noise cannot be pickled: every process would draw the same"
            " noise; make one in each process, from a key of its own"
        )

    def __deepcopy__(self, _: Any) -> "Trainings":
        return self


def _numbers_of(key: jax.Array) -> Iterator[int]:
    """One count for all optimizers of a secret key: `optax.inject_hyperparams` makes many.

    What comes from a seed must come again, and a traced key is known to nobody yet.
    """
    if _checks.is_traced(key) or _checks.is_staging() or is_seeded(key):
        return itertools.count()
    return _OF_KEYS[fingerprint_of_key(key)]
