"""`Draw`: a mechanism's compiled sampling function for values of given shapes and dtypes.

Checking a value and flattening a mechanism take longer than drawing noise. Mechanisms are
immutable, so both steps run once for all values that have the same structure, shapes and dtypes.
Nothing is cached for a mechanism that contains tracers, because tracers are invalid after tracing.
"""

import functools
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._open_ledgers import untold_programs
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._types import Key, TreeDef, Value
from dpjax._core._values import Guarantee, Mechanism, Sensitivity
from dpjax._exact._kernels import written
from dpjax._tracing._programs import Program, QuickJit, evaluate_alone
from dpjax._tracing._shards import computing_now
from dpjax.random._keys import key_for_each
from dpjax.release._transaction import guarantee_under

if TYPE_CHECKING:
    from dpjax.release._mechanism import SensitivityMechanism


# `jax.jit` would compare the structures of nested dataclasses at every call, which takes longer
# than drawing noise.
@functools.lru_cache
def _compiled(structure: TreeDef) -> tuple[QuickJit, set[tuple[np.dtype, TreeSpec, np.dtype]]]:
    """Returns a compiled function that all mechanisms with this pytree structure share.

    The function takes a mechanism's leaves, a key and a value, and returns the noisy value. The
    set contains the inputs for which the function is already compiled: each entry has the dtype of
    the key, the shapes and dtypes of the value, and JAX's default float dtype.
    """

    def draw(numbers: list[Any], key: Key, value: Value) -> Value:
        # Inside another program, the mechanism's numbers may be constants. XLA would fold these
        # constants at compile time, and might then round a quotient differently. The barrier
        # prevents this.
        mechanism = jax.tree.unflatten(structure, lax.optimization_barrier(numbers))
        return mechanism._draw(key_for_each(key, value), value)

    return QuickJit(draw), set()


class Draw:
    """A function that draws releases of one mechanism.

    It accepts values of one pytree structure, with fixed shapes and dtypes. It contains the numbers
    of the mechanism, but no reference to the mechanism itself. The keys of the cache `_DRAWS` are
    weak references to mechanisms. So when a mechanism is deleted, its draw is deleted, too.
    """

    def __init__(self, mechanism: "SensitivityMechanism", kind: TreeSpec):
        """Refuses values that the mechanism does not accept."""
        leaves = refuse_batch(mechanism)
        self.is_traced = _checks.any_traced(leaves)
        mechanism._check_like_sampled(kind)
        _with_host_numbers(mechanism, leaves)._check_value(kind.tree())
        # The noise does not depend on m, gamma or the identity of the samples. They are removed
        # here, because otherwise each new combination of them would be compiled again.
        whole = mechanism.sensitivity
        bare = Sensitivity(
            whole.value, 0.0, 1.0, whole.norm, None, whole.relation, zero_allowed=whole.zero_allowed
        )
        self.numbers, structure = jax.tree.flatten(changed(mechanism, sensitivity=bare))
        self._kind = kind
        self._compiled, self._ahead = _compiled(structure)
        self._pieces = None
        if not self.is_traced:
            with computing_now():  # The result is cached, so it must not contain tracers.
                self._pieces = mechanism._in_pieces(kind)
        self._guarantees = dict[Any, Guarantee]()
        self._accuracy: Accuracy | None = None

    def __call__(self, key: Key, value: Value) -> Value:
        """Draws the noisy value, without notifying ledgers."""
        if self._pieces is not None and _can_be_cut(key, jax.tree.leaves(value)):
            return self._pieces(key, value)
        if _checks.is_staging():
            # If the target is part of the same program, XLA could compute its value twice and round
            # it differently each time. The noise does not hide the difference of the two roundings.
            value = jax.tree.map(written, value)
        return self._compiled(self.numbers, key, value)

    def outline(self, key: Key, value: Value) -> Value:
        """Returns the same noisy value as a call, but is only traced, and never run.

        It consists of the same operations as the programs that do run, and is traced under the same
        settings. So JAX traces each of these operations only once.
        """
        with jax.debug_nans(False), jax.debug_infs(False), untold_programs():
            return (self if self._pieces is None else self._pieces)(key, value)

    def promised(self, mechanism: "SensitivityMechanism", key: Key) -> Guarantee:
        """Returns the guarantee of a release of `mechanism` under `key`."""
        if self.is_traced:
            return guarantee_under(key, mechanism.guarantee)
        kind = jax.random.key_impl(key)
        if kind not in self._guarantees:
            with computing_now():  # The result is cached, so it must not contain tracers.
                self._guarantees[kind] = guarantee_under(key, mechanism.guarantee)
        return self._guarantees[kind]

    def accuracy(self, mechanism: "SensitivityMechanism") -> Accuracy:
        """Returns the accuracy of a release of `mechanism`."""
        if self._accuracy is None:
            self._accuracy = mechanism.accuracy(self._kind)
        return self._accuracy

    def compile(self, mechanism: "SensitivityMechanism", key: Key) -> None:
        """Compiles all programs of a release; `key` only determines the key implementation."""
        kind = key.dtype, self._kind, jnp.result_type(float)
        if kind in self._ahead:
            return
        left = None
        if self._pieces is not None:
            # The noisy zeros are discarded: this call only compiles the programs of the draw.
            zeros = (jax.device_put(np.zeros(x.shape, x.dtype)) for x in self._kind.leaves)
            self(key, jax.tree.unflatten(self._kind.structure, zeros))
        else:
            left = compiling(self._compiled.lower(self.numbers, key, self._kind.tree()))
        try:
            self.accuracy(mechanism)
        finally:
            if left is not None:
                # If XLA failed, this raises its error before the release is paid for.
                left.result()
        self._ahead.add(kind)


class DrawOfAnother:
    """The draw of a third-party mechanism, which only implements the protocol `Mechanism`."""

    def __init__(self, mechanism: Mechanism, kind: TreeSpec):
        """Stores the mechanism and the kind of value. The mechanism checks its values itself."""
        self._mechanism, self._kind = mechanism, kind

    def __call__(self, key: Key, value: Value) -> Value:
        """Draws the noisy value by the mechanism's own method, without notifying ledgers."""
        return self._mechanism.unpaid_draw(key, value)

    outline = __call__

    def promised(self, mechanism: Mechanism, key: Key) -> Guarantee:
        """Returns the guarantee of a release under `key`."""
        return guarantee_under(key, mechanism.guarantee)

    def accuracy(self, mechanism: Mechanism) -> Accuracy:
        """Returns the accuracy of a release; unknown if the mechanism has no method `accuracy`."""
        knows = getattr(mechanism, "accuracy", None)
        return UNKNOWN if knows is None else knows(self._kind)


# Caches the draws of each mechanism, by the kind of value and by whether x64 is enabled: without
# x64, numbers are rounded outward to float32.
_DRAWS: weakref.WeakKeyDictionary[Any, dict[tuple[bool, TreeSpec], Draw]] = (
    weakref.WeakKeyDictionary()
)


def draw_of(mechanism: "SensitivityMechanism", kind: TreeSpec) -> Draw:
    """Returns the `Draw` of a mechanism for a kind of value, from the cache if possible."""
    if mechanism._calls_user:
        mechanism = mechanism._frozen(kind)
    known = _DRAWS.get(mechanism, {})
    which = bool(jax.config.jax_enable_x64), kind  # pyright: ignore
    if which in known:
        return known[which]
    mechanism._check_unclamped()
    made = Draw(mechanism, kind)
    if not made.is_traced:
        _DRAWS.setdefault(mechanism, known)[which] = made
    return made


def refuse_batch(mechanism: object) -> list[Any]:
    """Returns the leaves of a mechanism; refuses a batch of mechanisms that `vmap` returned."""
    leaves = jax.tree.leaves(mechanism)
    if shapes := {np.shape(leaf) for leaf in leaves} - {()}:
        raise ValueError(
            f"mechanism must be a single mechanism, got a batch of shape {shapes.pop()}: release "
            "with jax.vmap(lambda mechanism, key: mechanism(key, value))(mechanisms, keys)"
        )
    return leaves


def _with_host_numbers(mechanism: "SensitivityMechanism", leaves: list[Any]) -> Any:
    """Returns the mechanism with NumPy numbers in place of concrete JAX arrays, for Python checks.

    A mechanism that `jit` returned contains JAX arrays. Inside another `jit`, JAX would trace
    comparisons of these arrays, and Python could not use the results in `if` statements.
    """
    if not any(isinstance(x, jax.Array) and not _checks.is_traced(x) for x in leaves):
        return mechanism
    return jax.tree.map(lambda x: x if _checks.is_traced(x) else np.asarray(x)[()], mechanism)


def _can_be_cut(key: Key, leaves: list[jax.Array]) -> bool:
    """Whether a draw may run as several programs: nothing is traced, and no array is sharded."""
    return not _checks.any_traced(key, leaves) and all(len(x.devices()) == 1 for x in leaves)


def can_compile_ahead(draw: Draw, program: Program, used: list[Any]) -> bool:
    """Whether the draw and the concrete program of a target can be compiled before payment."""
    if draw.is_traced or program.calls_host or _checks.any_traced(used):
        return False
    # Programs are compiled ahead of time for the default device. A committed array may be on
    # another device, and then the compiled program could not be used.
    return not any(leaf.committed for leaf in used[1:])


def compile_ahead(
    draw: Draw, mechanism: "SensitivityMechanism", program: Program, key: Key, records: TreeSpec
) -> None:
    """Compiles target and draw concurrently: XLA compiles the target while Python traces the draw.

    Only the implementation of the key matters, not its bits.
    """
    # The release itself runs under these settings. If the programs were compiled under other
    # settings, JAX would not find them in its cache.
    with jax.debug_nans(False), jax.debug_infs(False), untold_programs():
        target = _compiling(program, records)
        try:
            draw.compile(mechanism, _key_of_zeros(key))
        finally:
            # Waits for the compilation of the target, and ignores its error: the release will raise
            # the same error.
            target.exception()


@functools.lru_cache(maxsize=256)
def _compiling(program: Program, records: TreeSpec) -> Future[None]:
    """Starts the compilation of a target in a thread, unless it was started before."""
    return compiling(evaluate_alone.lower(records.tree(), program=program))


def compiling(lowered: jax.stages.Lowered) -> Future[None]:
    """Starts the compilation of a lowered program in a thread, and returns its `Future`."""

    def compile_it() -> None:
        lowered.compile()

    pool = ThreadPoolExecutor(1)
    left = pool.submit(compile_it)
    pool.shutdown(wait=False)
    return left


def _key_of_zeros(key: Key) -> Key:
    """Returns a public key of the same implementation as `key`, whose bits are all zero."""
    words = jax.eval_shape(jax.random.key_data, key)
    zeros = jax.device_put(np.zeros(words.shape, words.dtype))
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(key))
