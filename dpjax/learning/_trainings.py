"""Ensures that no two trainings use the same key: their noise would be equal, and could cancel.

Two mistakes lead to a shared key. First, `init` of an optimizer looks pure, so programs call it
again for the next fold or restart, map over it, compile it, or send the optimizer to other
processes. Second, a state looks like any other value, so programs copy it to many lanes of a
`vmap`, or close over it in a function that runs many times.
"""

import collections
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import NoReturn, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import get_opaque_trace_state

from dpjax._core import _checks
from dpjax._core._open_ledgers import fingerprint_of_key
from dpjax._core._pytree import down, register_rounded, static
from dpjax._core._types import Key, PyTree
from dpjax.random._keys import is_seeded, key_for_each
from dpjax.release._transaction import tell_of_training

T = TypeVar("T", bound="TrainingState")

# New keys are made by `fold_in`. Trainings fold in the numbers 1, 2, 3, ..., and copies of a state
# under `vmap` fold in numbers just below `_LAST`. So their keys never coincide.
_LAST = np.uint32(2**32 - 1)
_OF_KEYS: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class Trainings:
    """Gives a number to each training of an optimizer, so that each has its own key.

    Each call of the optimizer's `init` starts a training. `init` must not be called inside `jit`,
    `vmap` or `scan`. There, one call may run several times with the same number.
    """

    def __init__(self, key: Key | None = None) -> None:
        """Records the process and the trace in which the optimizer was created."""
        # `init` must be called in the process and trace that are recorded here. Elsewhere, one call
        # may run many times, and every run would have the same index.
        self._key, self._place = key, (os.getpid(), get_opaque_trace_state())
        self._numbers = itertools.count()
        self._numbers_of_key = itertools.count() if key is None else _numbers_of(key)

    def number(self) -> int:
        """Returns the index of a new training, from 0."""
        if self._place != (os.getpid(), get_opaque_trace_state()):
            raise ValueError(
                "init must run where the optimizer was made, got another process, or a jit, vmap"
                " or scan that began later: several trainings would draw the same noise, and a"
                " difference of their results would contain no noise. Call init outside, or make"
                " the optimizer inside, from its own key"
            )
        return next(self._numbers)

    def key(self, parameters: PyTree) -> jax.Array:
        """Returns the key of a new training, and records it as used in open key ledgers.

        The first training uses the given key. If `vmap` maps over the parameters, every lane must
        have its own key.
        """
        key, number = self._key, self.number()
        assert key is not None
        if _checks.is_staging() and not _checks.is_traced(key):
            raise ValueError(
                "key must be an argument of the compiled function that trains, got a key from "
                "outside: every run would draw the same noise, and the program would keep the key"
            )
        if number == 0:
            tell_of_training(key)
        if number := next(self._numbers_of_key):
            key = jax.random.fold_in(key, number)
            tell_of_training(key)
        return key_for_each(key, parameters)

    def __reduce__(self) -> NoReturn:
        """Raises an error, because a copy in another process would count trainings separately."""
        raise TypeError(
            "an optimizer with noise cannot be pickled: make another optimizer in each process, and"
            " give each of them its own key"
        )

    def __deepcopy__(self, _: object) -> "Trainings":
        return self


def key_of_next_use(key: Key) -> Key:
    """Returns the key at its first use in this process, and a key derived from it at later uses.

    Seeded and traced keys are always returned unchanged.
    """
    number = next(_numbers_of(key))
    return jax.random.fold_in(key, number) if number else key


class TrainingState:
    """A state that records the trace in which it was created; made a pytree by `training_state`.

    If a function closed over a state, each run of the function would draw the same noise. So
    `refuse_if_closed_over` raises an error if the state was made in another trace. It accepts an
    argument of a function or the carry of a loop, because JAX makes a new state of these in the
    trace of the function. A function cannot avoid this check by passing a closed-over state to an
    inner function. JAX then flattens the state, and flattening raises an error if the state was
    made in another trace.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Records the current trace."""
        made = object.__new__(cls)
        vars(made)["_trace"] = get_opaque_trace_state()
        return made

    def refuse_if_closed_over(self) -> None:
        """Raises an error if the running function closes over this state."""
        if vars(self)["_trace"] != get_opaque_trace_state():
            raise ValueError(
                "state must enter this function as an argument, got a state from outside of the "
                "jit, scan, map, vmap, cond or shard_map that is running: every run would draw the "
                "same noise. Make the state an argument, a carry of scan, or an operand of cond"
            )

    def refuse_if_moved(self) -> None:
        """Raises an error if a state that contains arrays is flattened outside of its own trace."""
        moved = vars(self)["_trace"] != get_opaque_trace_state()
        if moved and any(isinstance(x, jax.Array) for x in jax.tree.leaves([*vars(self).values()])):
            self.refuse_if_closed_over()

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Supports copies. A copy belongs to the trace in which it is unpickled."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return type(self), tuple(getattr(self, field.name) for field in fields)


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static, down)
)
def training_state(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass. JAX can flatten an instance only in the trace that created it.

    But JAX can flatten an instance without arrays in any trace. Such instances are the `in_axes` of
    `vmap` and the `in_specs` of `shard_map` for a state.
    """
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    return register_rounded(made, TrainingState.refuse_if_moved)


def key_of_each_lane(key: Key) -> Key:
    """Returns `key`. Under `vmap`, a lane gets a new key if an earlier lane has the same key.

    So copies of one state get different keys. The data of these copies differ, so their noise must
    differ as well.
    """
    implementation = jax.random.key_impl(key)

    @custom_vmap
    def apart(words: jax.Array, used: jax.Array) -> jax.Array:
        del used
        if words.ndim == 1:
            return words
        lanes = words.reshape(-1, words.shape[-1])
        same = jnp.all(lanes[:, None] == lanes[None], axis=2)
        # For each lane, counts the earlier lanes that have the same key. A lane with a count of 0
        # keeps its key.
        earlier = jnp.sum(jnp.tril(same, -1), axis=1, dtype=jnp.uint32)
        keys = jax.random.wrap_key_data(lanes, impl=implementation)
        new = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, _LAST - earlier))
        return jnp.where(earlier[:, None] == 0, lanes, new).reshape(words.shape)

    @apart.def_vmap
    def _(_: int, mapped: list[bool], *batched: jax.Array) -> tuple[jax.Array, bool]:
        del mapped
        return apart(*batched), True  # Under nested `vmap`, the last call receives all lanes.

    # A draw of zero bits marks the key as used, for `jax.debug_key_reuse`.
    words = apart(jax.random.key_data(key), jax.random.bits(key, (0,)))
    return jax.random.wrap_key_data(words, impl=implementation)


def _numbers_of(key: Key) -> Iterator[int]:
    """Returns the counter that numbers the trainings of a key.

    All optimizers of one secret key share a counter, because `optax.inject_hyperparams` makes many
    optimizers of one key. With a seeded or traced key, each optimizer has its own counter:
    trainings from a seed must be reproducible, and the value of a traced key is not known yet.
    """
    if _checks.is_traced(key) or _checks.is_staging() or is_seeded(key):
        return itertools.count()
    return _OF_KEYS[fingerprint_of_key(key)]
