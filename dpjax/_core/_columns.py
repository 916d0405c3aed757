"""Columns that JAX arrays cannot represent, with the operations that queries need.

`Numbers` have 64 bits even without x64, or may have missing entries. `Texts` can be compared like
texts. `Refused` stands for an unsupported column, and raises only when something uses it.
"""

import contextlib
import datetime
import decimal
import functools
import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
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
        held: an array of the numbers; 64-bit numbers as pairs of uint32 words along a last axis of
            2.
        known: which numbers are not missing; None if the dtype has no missing numbers.
        of_dtype: the NumPy dtype of the numbers; it may be integer or boolean even if some are
            missing.
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
        """The shape of the numbers."""
        return self.held.shape[:-1] if self.of_dtype.itemsize == 8 else self.held.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers as an array: a float dtype, for NaN, if some may be missing."""
        return self.of_dtype if self.known is None else np.dtype(np.float64)

    def __getitem__(self, index: Any) -> "Numbers":
        known = None if self.known is None else self.known[index]
        return Numbers(self.held[index], known, self.of_dtype)

    def exact(self) -> tuple[jax.Array, jax.Array]:
        """The numbers, and which of them are known. Call it within `in_64_bits`."""
        held = jnp.asarray(self.held)
        if self.of_dtype.itemsize == 8:
            held = lax.bitcast_convert_type(held, self.of_dtype)
        known = jnp.ones(held.shape, bool) if self.known is None else jnp.asarray(self.known)
        return held, known

    def array(self) -> jax.Array:
        """The numbers as an array, with NaN for missing ones. Call it within `in_64_bits`."""
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
    """Refuses anything except one array of numbers of one of these shapes. None is any length."""
    check_usable(records)
    if isinstance(records, (jax.Array, Numbers)) and any(_fits(records.shape, x) for x in shapes):
        return
    wanted = " or ".join(map(_in_letters, shapes))
    found = _checks.described(records)
    if found == "texts":
        raise TypeError(
            f"{name} must be numbers of shape {wanted}, got texts: convert them to their positions"
            " in a public list, as by pandas.Index(public).get_indexer(column), or count them by"
            " dpjax.queries.by"
        )
    remedy = ""
    if getattr(records, "ndim", None) == 1 and all(len(shape) == 2 for shape in shapes):
        remedy = ": give one number for each record by numpy.reshape(column, (-1, 1))"
    if isinstance(records, (Mapping, Sequence)):
        remedy = (
            ": pass one column, as table[name], or one array with several numbers per record, by"
            " numpy.stack([table[name] for name in names], axis=1)"
        )
    raise ValueError(f"{name} must be numbers of shape {wanted}, got {found}{remedy}")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(x is None or size == x for size, x in pairs)


def _in_letters(shape: tuple[int | None, ...]) -> str:
    """A shape in letters, with n for the number of records."""
    return "(n,)" if len(shape) == 1 else f"(n, {'d' if shape[1] is None else shape[1]})"


def in_64_bits(records: PyTree) -> contextlib.AbstractContextManager[object]:
    """A context in which JAX holds the `Numbers` of a database as arrays."""
    leaves = jax.tree.leaves(records, is_leaf=is_numbers)
    wide = any(isinstance(leaf, Numbers) for leaf in leaves)
    return _exactly() if wide else contextlib.nullcontext()


@contextlib.contextmanager
def _exactly() -> Generator[None]:
    """Allows NaN and infinite records, even if JAX is configured to raise at them."""
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        yield


def comparing(numbers: jax.Array) -> contextlib.AbstractContextManager[object]:
    """A context in which the integers of an array can be compared with floats exactly."""
    integers = jnp.issubdtype(numbers.dtype, jnp.integer) and numbers.dtype.itemsize >= 4
    return _exactly() if integers else contextlib.nullcontext()


def as_arrays(records: PyTree) -> PyTree:
    """A database with arrays in place of `Numbers`. Call it within `in_64_bits`."""
    return jax.tree.map(
        lambda x: x.array() if isinstance(x, Numbers) else x, records, is_leaf=is_numbers
    )


def for_functions(records: PyTree) -> PyTree:
    """Arrays in the form that a user's function of a record gets. Call it within `in_64_bits`.

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


# Larger integers are excluded, because Python refuses to print thousands of digits.
_LARGEST = 10**400


@frozen_pytree
class Texts:
    """A column of texts as 128-bit fingerprints, which are equal if the texts are.

    Attributes:
        words: uint32 of shape (n, 4); 0 for a missing text.
    """

    words: jax.Array | np.ndarray

    is_column: ClassVar = True  # For messages.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the column."""
        return self.words.shape[:-1]

    def __eq__(self, other: object) -> Any:
        """Which entries equal a given text, for use in functions of a record."""
        if isinstance(other, str):
            other = Texts(fingerprints([other])[0])
        if not isinstance(other, Texts):
            raise TypeError(
                f"a column of texts can only be compared with a text, got {_checks.shown(other)}"
            )
        return jnp.all(self.words == other.words, axis=-1) & jnp.any(self.words != 0, axis=-1)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "texts"


def fingerprints(texts: Iterable[object]) -> np.ndarray:
    """The words of `Texts`, each computed from its own text alone."""

    # Cached, because texts repeat in a column, and hashing all of them takes longer than a release.
    @functools.cache
    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    digests = [bytes(16) if text is None else digest(text) for text in map(as_text, texts)]
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 4)


def as_text(entry: object) -> str | None:
    """An entry of a column of texts or objects, as text; None if missing or of another type.

    Numbers become their digits, because whether a column of objects holds numbers is private. Equal
    numbers of different types become the same text.
    """
    if isinstance(entry, str):
        return str(entry)
    if isinstance(entry, (np.integer, np.bool_)):
        entry = int(entry)
    if isinstance(entry, np.floating):
        entry = float(entry)
    if isinstance(entry, decimal.Decimal) and not entry.is_finite():
        return None
    if isinstance(entry, (int, float, decimal.Decimal)):
        # This comparison is also false for NaN.
        if not -_LARGEST < entry < _LARGEST:
            return None
        return str(int(entry)) if entry == int(entry) else _digits_of(entry)
    # NaT, pandas' missing date, is also an instance of date, but not equal to itself.
    return str(entry) if isinstance(entry, datetime.date) and entry == entry else None


def _digits_of(number: float | decimal.Decimal) -> str:
    """The digits of a number that is not whole, without trailing zeros."""
    exact = number if isinstance(number, decimal.Decimal) else decimal.Decimal(repr(number))
    sign, digits, exponent = exact.as_tuple()
    kept = "".join(map(str, digits)).rstrip("0")
    shorter = int(exponent) + len(digits) - len(kept)
    return str(decimal.Decimal((sign, tuple(map(int, kept)), shorter)))


@frozen_pytree
class Refused:
    """A column of a table with a dtype that no query reads. Other columns remain usable.

    Attributes:
        message: the error message that is raised when the column is used.
    """

    message: str = static()

    def refuse(self, *_: object, **__: object) -> Any:
        """Raises the error."""
        raise TypeError(self.message)

    __array__ = __jax_array__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __neg__ = __abs__ = __invert__ = __and__ = __or__ = __rand__ = __ror__ = refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = refuse

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "unusable"


def is_column(leaf: PyTree) -> bool:
    """Whether a node of a database is a column that was converted."""
    return isinstance(leaf, (Numbers, Texts))


def check_usable(column: PyTree) -> None:
    """Refuses a column whose dtype no query reads."""
    if isinstance(column, Refused):
        column.refuse()
