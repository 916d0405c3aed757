"""Numbers that no array of JAX holds: of 64 bits without x64, or with some of them missing."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import PyTree


@frozen_pytree
class Numbers:
    """Numbers of one NumPy dtype, exact in any mode of JAX.

    Attributes:
        held: an array of them; those of 64 bits as words, uint32 with a last axis of 2.
        known: which of them are not missing; None if none can be.
        of_dtype: the NumPy dtype, which is that of integers or booleans where some may be missing.
    """

    held: jax.Array | np.ndarray
    known: jax.Array | np.ndarray | None
    of_dtype: np.dtype = static()

    is_column: ClassVar = True  # For messages.

    @classmethod
    def of(cls, numbers: np.ndarray, known: np.ndarray | None = None) -> Self:
        """These numbers, on the host."""
        if numbers.dtype.itemsize < 8:
            return cls(numbers, known, numbers.dtype)
        words = np.ascontiguousarray(numbers).view(np.uint32)
        return cls(words.reshape(*numbers.shape, 2), known, numbers.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers."""
        return self.held.shape[:-1] if self.of_dtype.itemsize == 8 else self.held.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many there are."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers as an array: where some may be missing, floats with NaN."""
        return self.of_dtype if self.known is None else np.dtype(np.float64)

    def __getitem__(self, index: Any) -> "Numbers":
        known = None if self.known is None else self.known[index]
        return Numbers(self.held[index], known, self.of_dtype)

    def exact(self) -> tuple[jax.Array, jax.Array]:
        """The numbers, and which of them are known; within `in_64_bits`."""
        held = jnp.asarray(self.held)
        if self.of_dtype.itemsize == 8:
            held = lax.bitcast_convert_type(held, self.of_dtype)
        known = jnp.ones(held.shape, bool) if self.known is None else jnp.asarray(self.known)
        return held, known

    def array(self) -> jax.Array:
        """The numbers as an array, with NaN for missing ones; within `in_64_bits`."""
        held, known = self.exact()
        return held if self.known is None else jnp.where(known, held.astype(float), jnp.nan)

    def on_host(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The numbers, exact, and which of them are known; they must not be traced."""
        held = np.asarray(self.held)
        if self.of_dtype.itemsize == 8:
            held = np.ascontiguousarray(held).view(self.of_dtype)[..., 0]
        return held, None if self.known is None else np.asarray(self.known)

    def __repr__(self) -> str:
        return f"{self.of_dtype}{list(self.shape)}"


def is_numbers(leaf: PyTree) -> bool:
    """Whether a node of a database is `Numbers`."""
    return isinstance(leaf, Numbers)


def check_numbers(name: str, records: PyTree, *shapes: tuple[int | None, ...]) -> None:
    """Refuses what is not one array of numbers of one of these shapes; None is any length."""
    if isinstance(records, (jax.Array, Numbers)) and any(_fits(records.shape, x) for x in shapes):
        return
    wanted = " or ".join(map(_in_letters, shapes))
    found = _checks.described(records)
    if found == "texts":
        raise TypeError(
            f"{name} must be numbers of shape {wanted}, got texts: number them by a public list, as"
            " by pandas.Index(public).get_indexer(column), or count those of a list by"
            " dpjax.queries.by"
        )
    remedy = ""
    if getattr(records, "ndim", None) == 1 and all(len(shape) == 2 for shape in shapes):
        remedy = ": give one number for each record by numpy.reshape(column, (-1, 1))"
    if isinstance(records, (Mapping, Sequence)):
        remedy = (
            ": take one column, as table[name], or make one array of several numbers for each"
            " record, by numpy.stack([table[name] for name in names], axis=1)"
        )
    raise ValueError(f"{name} must be numbers of shape {wanted}, got {found}{remedy}")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(x is None or size == x for size, x in pairs)


def _in_letters(shape: tuple[int | None, ...]) -> str:
    """A shape of records, whose number does not matter."""
    return "(n,)" if len(shape) == 1 else f"(n, {'d' if shape[1] is None else shape[1]})"


def in_64_bits(records: PyTree) -> contextlib.AbstractContextManager[object]:
    """A context in which JAX holds the `Numbers` of a database as arrays."""
    leaves = jax.tree.leaves(records, is_leaf=is_numbers)
    wide = any(isinstance(leaf, Numbers) for leaf in leaves)
    return _exactly() if wide else contextlib.nullcontext()


@contextlib.contextmanager
def _exactly() -> Generator[None]:
    """Records may be NaN or infinite, whatever JAX is told to stop at."""
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        yield


def comparing(numbers: jax.Array) -> contextlib.AbstractContextManager[object]:
    """A context in which floats hold the integers of an array, to compare them with floats."""
    integers = jnp.issubdtype(numbers.dtype, jnp.integer) and numbers.dtype.itemsize >= 4
    return _exactly() if integers else contextlib.nullcontext()


def as_arrays(records: PyTree) -> PyTree:
    """A database with arrays for `Numbers`; within `in_64_bits`."""
    return jax.tree.map(
        lambda x: x.array() if isinstance(x, Numbers) else x, records, is_leaf=is_numbers
    )


def for_functions(records: PyTree) -> PyTree:
    """Arrays as functions of a record get them, within `in_64_bits`.

    Integers have at least JAX's default dtype. In a narrower one JAX would wrap the numbers that a
    function compares them with.
    """

    def widened(x: jax.Array) -> jax.Array:
        least = jnp.dtype(jnp.result_type(int))
        integers = jnp.issubdtype(x.dtype, jnp.integer)
        return x.astype(least) if integers and x.dtype.itemsize < least.itemsize else x

    def one(x: jax.Array | Numbers) -> jax.Array | Numbers:
        return widened(x.array() if isinstance(x, Numbers) else x) if hasattr(x, "dtype") else x

    return jax.tree.map(one, records, is_leaf=lambda x: hasattr(x, "is_column"))
