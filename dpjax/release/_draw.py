"""The draw of a mechanism for one kind of value: checked once, compiled once, then kept.

Checking a value and flattening a mechanism take longer than drawing noise. A mechanism is frozen.
So both are done once for all values of one structure, with the same shapes and dtypes. Nothing is
kept for a mechanism that holds tracers, because they are invalid after their trace.
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
from dpjax._core._computing_now import computing_now
from dpjax._core._open_ledgers import untold_programs
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._types import Key, TreeDef, Value
from dpjax._core._values import Guarantee, Mechanism, Sensitivity
from dpjax._exact._kernels import written
from dpjax._tracing._programs import Program, QuickJit, evaluate_alone
from dpjax.random._keys import key_for_each
from dpjax.release._transaction import guarantee_under

if TYPE_CHECKING:
    from dpjax.release._mechanism import SensitivityMechanism


class Compiled:
    """One compiled function that draws for all mechanisms of one structure.

    Attributes:
        draw: maps the numbers of a mechanism, a key and a value to the noisy value.
        ahead: the kinds of keys and values that it is already compiled for.
    """

    def __init__(self, structure: TreeDef):
        """Takes the tree structure of a mechanism, as `jax.tree.flatten` returns it."""

        def draw(numbers: list[Any], key: Key, value: Value) -> Value:
            # Inside another program the numbers may be constants. XLA would fold them while it
            # compiles, and might round a quotient differently. The barrier prevents folding.
            mechanism = jax.tree.unflatten(structure, lax.optimization_barrier(numbers))
            return mechanism._draw(key_for_each(key, value), value)

        self.draw = QuickJit(draw)
        self.ahead = set[tuple[np.dtype, TreeSpec, np.dtype]]()


# `jax.jit` would compare structures of nested dataclasses at every draw. That takes longer than the
# draw, so `Draw` keeps its compiled function.
_compiled = functools.lru_cache(Compiled)


class Draw:
    """The draw of one mechanism for one kind of value.

    It holds the numbers of the mechanism, but no reference to the mechanism. So `_DRAWS`, whose
    keys are weak references to mechanisms, drops the draw together with the mechanism.
    """

    def __init__(self, mechanism: "SensitivityMechanism", kind: TreeSpec):
        """Refuses a kind of value that the mechanism does not take."""
        leaves = refuse_batch(mechanism)
        self.is_traced = _checks.any_traced(leaves)
        arrays = kind.tree()
        mechanism._check_like_sampled(kind)
        _with_host_numbers(mechanism, leaves)._check_value(arrays)
        # The draw does not depend on m, gamma or the identity of the samples. They are left out,
        # because each of their values would compile another program.
        whole = mechanism.sensitivity
        bare = Sensitivity(
            whole.value, 0.0, 1.0, whole.norm, None, whole.relation, zero_allowed=whole.zero_allowed
        )
        self.numbers, self._structure = jax.tree.flatten(changed(mechanism, sensitivity=bare))
        self._compiled, self._kind = _compiled(self._structure), kind
        self._pieces = None
        if not self.is_traced:
            with computing_now():  # Nothing traced is kept.
                self._pieces = mechanism._in_pieces(kind)
        self._guarantees = dict[Any, Guarantee]()
        self._accuracy: Accuracy | None = None

    def __call__(self, key: Key, value: Value) -> Value:
        """Draws the noisy value; tells no ledger."""
        if self._pieces is not None and _can_be_cut(key, jax.tree.leaves(value)):
            return self._pieces(key, value)
        if _checks.is_staging():
            # In one program with the target, XLA could compute the value again for each of its
            # uses, and round it differently. Noise does not hide the difference of two roundings.
            value = jax.tree.map(written, value)
        return self._compiled.draw(self.numbers, key, value)

    def outline(self, key: Key, value: Value) -> Value:
        """The draw as a program that is traced for its operations and shapes, and never run.

        It has the operations of the programs that are run, so JAX traces them once.
        """
        with jax.debug_nans(False), jax.debug_infs(False):
            return (self if self._pieces is None else self._pieces)(key, value)

    def promised(self, mechanism: "SensitivityMechanism", key: Key) -> Guarantee:
        """The guarantee of a release under a key. `mechanism` is the mechanism of this draw."""
        if self.is_traced:
            return guarantee_under(key, mechanism.guarantee)
        kind = jax.random.key_impl(key)
        if kind not in self._guarantees:
            with computing_now():  # Nothing traced is kept.
                self._guarantees[kind] = guarantee_under(key, mechanism.guarantee)
        return self._guarantees[kind]

    def accuracy(self, mechanism: "SensitivityMechanism") -> Accuracy:
        """How far a release may be off. `mechanism` is the mechanism of this draw."""
        if self._accuracy is None:
            self._accuracy = mechanism.accuracy(self._kind)
        return self._accuracy

    def compile(self, mechanism: "SensitivityMechanism", key: Key) -> None:
        """Compiles the programs of a release. Only the implementation of the key matters."""
        kind = key.dtype, self._kind, jnp.result_type(float)
        if kind in self._compiled.ahead:
            return
        left = None
        if self._pieces is not None:
            # This draw only compiles programs. Its result is dropped.
            zeros = (jax.device_put(np.zeros(x.shape, x.dtype)) for x in self._kind.leaves)
            self(key, jax.tree.unflatten(self._kind.structure, zeros))
        else:
            left = compiling(self._compiled.draw.lower(self.numbers, key, self._kind.tree()))
        try:
            self.accuracy(mechanism)
        finally:
            if left is not None:
                left.result()  # Raises if XLA fails, before the release is paid for.
        self._compiled.ahead.add(kind)


class DrawOfAnother:
    """The draw of a mechanism of another library, which has the methods of `Mechanism` only."""

    def __init__(self, mechanism: Mechanism, kind: TreeSpec):
        """The mechanism checks its values itself."""
        self._mechanism, self._kind = mechanism, kind

    def __call__(self, key: Key, value: Value) -> Value:
        """The noisy value."""
        return self._mechanism.unpaid_draw(key, value)

    outline = __call__

    def promised(self, mechanism: Mechanism, key: Key) -> Guarantee:
        """The guarantee of a release under a key."""
        return guarantee_under(key, mechanism.guarantee)

    def accuracy(self, mechanism: Mechanism) -> Accuracy:
        """How far a release may be off, if the mechanism says so."""
        knows = getattr(mechanism, "accuracy", None)
        return UNKNOWN if knows is None else knows(self._kind)


# Keyed by mechanism, then by whether JAX has float64: without it, numbers are rounded outward.
_DRAWS: weakref.WeakKeyDictionary[Any, dict[tuple[bool, TreeSpec], Draw]] = (
    weakref.WeakKeyDictionary()
)


def draw_of(mechanism: "SensitivityMechanism", kind: TreeSpec) -> Draw:
    """The draw of a mechanism for a kind of value, made once and then reused."""
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
    """Returns the numbers of one mechanism, and refuses a batch that `vmap` returned."""
    leaves = jax.tree.leaves(mechanism)
    if shapes := {np.shape(leaf) for leaf in leaves} - {()}:
        raise ValueError(
            f"mechanism must be a single one, got a batch of shape {shapes.pop()}: release with"
            " jax.vmap(lambda mechanism, key: mechanism(key, value))(mechanisms, keys)"
        )
    return leaves


def _with_host_numbers(mechanism: "SensitivityMechanism", leaves: list[Any]) -> Any:
    """The mechanism with known arrays of JAX as NumPy numbers, for checks.

    A mechanism that `jit` returned holds such arrays. Inside another `jit`, JAX would trace
    comparisons of them, and Python could not decide on the result.
    """
    if not any(isinstance(x, jax.Array) and not _checks.is_traced(x) for x in leaves):
        return mechanism
    return jax.tree.map(lambda x: x if _checks.is_traced(x) else np.asarray(x)[()], mechanism)


def _can_be_cut(key: Key, leaves: list[jax.Array]) -> bool:
    """Whether a draw may run as several programs: nothing is traced, and no array is sharded."""
    traced = _checks.any_traced(key, leaves)
    return not traced and all(len(x.devices()) == 1 for x in leaves)


def can_compile_ahead(draw: Draw, program: Program, used: list[Any]) -> bool:
    """Whether target and draw can be compiled before the release, and do not call the host."""
    if draw.is_traced:
        return False
    if not program.is_concrete or program.calls_host or _checks.any_traced(used):
        return False
    # Ahead of time, a program is compiled for the default device. Committed arrays may be on
    # another.
    return not any(leaf.committed for leaf in used[1:])


def compile_ahead(
    draw: Draw, mechanism: "SensitivityMechanism", program: Program, key: Key, records: TreeSpec
) -> None:
    """Compiles target and draw: while XLA compiles one, Python traces the other.

    Only the implementation of the key matters, not its words.
    """
    # A release runs under these settings. With others, it would not find the programs in the cache.
    with jax.debug_nans(False), jax.debug_infs(False), untold_programs():
        target = _compiling(program, records)
        try:
            draw.compile(mechanism, _key_of_zeros(key))
        finally:
            target.exception()  # Waits. If XLA fails, the release will raise the same error.


@functools.lru_cache(maxsize=256)
def _compiling(program: Program, records: TreeSpec) -> Future[None]:
    """The compilation of a target, running or finished."""
    return compiling(evaluate_alone.lower(records.tree(), program=program))


def compiling(lowered: jax.stages.Lowered) -> Future[None]:
    """Starts the compilation of a program in a thread."""

    def compile_it() -> None:
        lowered.compile()

    pool = ThreadPoolExecutor(1)
    left = pool.submit(compile_it)
    pool.shutdown(wait=False)
    return left


def _key_of_zeros(key: Key) -> Key:
    """A public key of the same kind."""
    words = jax.eval_shape(jax.random.key_data, key)
    zeros = jax.device_put(np.zeros(words.shape, words.dtype))
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(key))
