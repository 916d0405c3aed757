"""Columns of tables that JAX arrays cannot represent, with the operations that queries need.

`Numbers` contain 64-bit numbers, also if JAX's x64 mode is off, and may have missing entries.
`Texts` represent strings by hashes, which can only be compared for equality. `Refused` is a column
that no query supports. It raises an error only if it is used.
"""

import contextlib
import datetime
import decimal
import functools
import hashlib
import string
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
    """Numbers of one NumPy dtype, stored exactly whether or not x64 is enabled.

    Attributes:
        held: the array of the numbers. Each 64-bit number is stored as two uint32 words, along an
            additional last axis.
        known: booleans that are False for missing numbers; None if numbers of this column cannot be
            missing.
        of_dtype: the NumPy dtype of the numbers. It may be an integer or boolean dtype even if
            numbers are missing.
    """

    held: jax.Array | np.ndarray
    known: jax.Array | np.ndarray | None
    of_dtype: np.dtype = static()

    is_column: ClassVar = True  # `_checks.described` looks for this attribute.

    @classmethod
    def of(cls, numbers: np.ndarray, known: np.ndarray | None = None) -> Self:
        """Makes `Numbers` from NumPy arrays; `known` is False where a number is missing."""
        if numbers.dtype.itemsize < 8:
            return cls(numbers, known, numbers.dtype)
        words = np.ascontiguousarray(numbers).view(np.uint32)
        return cls(words.reshape(*numbers.shape, 2), known, numbers.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers, without the axis for the two words of a 64-bit number."""
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
        """The dtype that `array()` returns.

        It is float64 if numbers may be missing, because missing numbers become NaN.
        """
        return self.of_dtype if self.known is None else np.dtype(np.float64)

    def __getitem__(self, index: Any) -> "Numbers":
        known = None if self.known is None else self.known[index]
        return Numbers(self.held[index], known, self.of_dtype)

    def exact(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers as a JAX array, and booleans that are False for missing numbers.

        Call it within `in_64_bits`.
        """
        held = jnp.asarray(self.held)
        if self.of_dtype.itemsize == 8:
            held = lax.bitcast_convert_type(held, self.of_dtype)
        known = jnp.ones(held.shape, bool) if self.known is None else jnp.asarray(self.known)
        return held, known

    def array(self) -> jax.Array:
        """Returns the numbers as a JAX array, in which missing numbers are NaN.

        Call it within `in_64_bits`.
        """
        held, known = self.exact()
        return held if self.known is None else jnp.where(known, held.astype(float), jnp.nan)

    def on_host(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the numbers as a NumPy array, and booleans that are False for missing numbers.

        The booleans are None if no number can be missing. The numbers must not be traced.
        """
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
    """Refuses anything except one array of numbers that has one of these shapes.

    A size of None in a shape matches any length.
    """
    check_usable(records)
    if isinstance(records, (jax.Array, Numbers)) and any(_fits(records.shape, x) for x in shapes):
        return
    wanted = " or ".join(map(_in_letters, shapes))
    found = _checks.described(records)
    if found == "texts":
        raise TypeError(
            f"{name} must be numbers of shape {wanted}, got texts: convert each text to its"
            " position in a public list, for example by"
            " pandas.Index(public).get_indexer(column), or use dpjax.queries.by to count the texts"
        )
    remedy = ""
    if getattr(records, "ndim", None) == 1 and all(len(shape) == 2 for shape in shapes):
        remedy = ": if each record has one number, pass numpy.reshape(column, (-1, 1))"
    if isinstance(records, (Mapping, Sequence)):
        remedy = (
            ": pass one column, as table[name], or one array with several numbers per record, by"
            " numpy.stack([table[name] for name in names], axis=1)"
        )
    raise ValueError(f"{name} must be numbers of shape {wanted}, got shape {found}{remedy}")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(x is None or size == x for size, x in pairs)


def _in_letters(shape: tuple[int | None, ...]) -> str:
    """Returns the text of a shape for messages, with n for the number of records."""
    return "(n,)" if len(shape) == 1 else f"(n, {'d' if shape[1] is None else shape[1]})"


def in_64_bits(records: PyTree) -> contextlib.AbstractContextManager[object]:
    """Returns a context that enables x64 if a database contains `Numbers`.

    In this context, `Numbers` can be converted to arrays exactly.
    """
    leaves = jax.tree.leaves(records, is_leaf=is_numbers)
    wide = any(isinstance(leaf, Numbers) for leaf in leaves)
    return _exactly() if wide else contextlib.nullcontext()


@contextlib.contextmanager
def _exactly() -> Generator[None]:
    """Enables x64, and allows NaN and infinity even if JAX is configured to refuse them."""
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        yield


def comparing(numbers: jax.Array) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the integers of an array compare exactly with floats."""
    integers = jnp.issubdtype(numbers.dtype, jnp.integer) and numbers.dtype.itemsize >= 4
    return _exactly() if integers else contextlib.nullcontext()


def as_arrays(records: PyTree) -> PyTree:
    """Replaces each `Numbers` of a database by its array. Call it within `in_64_bits`."""
    return jax.tree.map(
        lambda x: x.array() if isinstance(x, Numbers) else x, records, is_leaf=is_numbers
    )


def for_functions(records: PyTree) -> PyTree:
    """Returns records as the arrays that dpjax passes to a user's function of one record.

    Call it within `in_64_bits`. Narrow integers are widened to JAX's default integer dtype.
    Otherwise, JAX would cast a Python number in the user's function to the narrow dtype, where it
    could wrap around.
    """

    def widened(x: jax.Array) -> jax.Array:
        least = jnp.dtype(jnp.result_type(int))
        integers = jnp.issubdtype(x.dtype, jnp.integer)
        return x.astype(least) if integers and x.dtype.itemsize < least.itemsize else x

    def one(x: jax.Array | Numbers) -> jax.Array | Numbers:
        return widened(x.array() if isinstance(x, Numbers) else x) if hasattr(x, "dtype") else x

    return jax.tree.map(one, records, is_leaf=lambda x: hasattr(x, "is_column"))


# Larger integers count as missing, because Python refuses to convert thousands of digits to a
# string.
_LARGEST = 10**400


@frozen_pytree
class Texts:
    """A column of strings, stored as 128-bit hashes: equal strings have equal hashes.

    Attributes:
        words: uint32 of shape (n, 4), one hash for each string; zeros for a missing string.
    """

    words: jax.Array | np.ndarray

    is_column: ClassVar = True  # `_checks.described` looks for this attribute.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the column."""
        return self.words.shape[:-1]

    def __eq__(self, other: object) -> Any:
        """Returns which entries equal a given string. A missing entry equals nothing."""
        if isinstance(other, str):
            other = Texts(fingerprints([other])[0])
        if not isinstance(other, Texts):
            raise TypeError(
                f"a column of texts can only be compared with a text, got {_checks.shown(other)}"
            )
        words = other.words
        # If `other` has fewer axes, it is a single text, which is compared with every entry.
        if words.ndim < self.words.ndim:
            words = words[(None,) * (self.words.ndim - words.ndim)]
        return jnp.all(self.words == words, axis=-1) & jnp.any(self.words != 0, axis=-1)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = object.__hash__

    def _refuse_order(self, other: object) -> Any:
        raise TypeError(
            "a column of texts can only be compared by == and !=, not by <, <=, > or >= with"
            f" {_checks.shown(other)}. A pandas column of dtype object counts as texts, too:"
            " convert it by pandas.to_numeric or pandas.to_datetime"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _refuse_order

    def __getitem__(self, index: Any) -> "Texts":
        return Texts(self.words[index])

    def __repr__(self) -> str:
        return "texts"


def texts(public: Sequence[str]) -> Texts:
    """Public texts as a column that JAX code can index, for models of tables.

    Args:
        public: texts, such as the keys of a column.

    Returns:
        A column of texts. `column[places]` has the text at each place, as for an array. Statistics
        compare these texts with keys, as they do for a column of a table.

    Raises:
        TypeError: if `public` is not a list of texts.

    Formal guarantees:
        None are needed: the texts are public. Texts are compared by fingerprints of 128 bits.

    Source:
        None.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> wards = queries.texts(["A", "B"])
        >>> (wards[jnp.array([0, 1, 1])] == "B").tolist()
        [False, True, True]
    """
    if isinstance(public, str) or not all(isinstance(one, str) for one in public):
        raise TypeError(f"public must be a list of texts, got {_checks.shown(public)}")
    return Texts(jnp.asarray(fingerprints(public)))


def fingerprints(texts: Iterable[object]) -> np.ndarray:
    """Returns the 128-bit hashes of strings, in the format of `Texts.words`."""

    # Hashes are cached, because strings repeat in a column, and hashing every row would take longer
    # than a release.
    @functools.cache
    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    digests = [bytes(16) if text is None else digest(text) for text in map(as_text, texts)]
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 4)


def as_text(entry: object) -> str | None:
    """Returns an entry of a column of objects as a string.

    The result is None for missing entries and for other types.

    A number becomes the string of its digits. An error instead would reveal that a column of
    objects contains numbers, and this may be private. Equal numbers of different types give equal
    strings.
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
        # This comparison is also false if the entry is NaN.
        if not -_LARGEST < entry < _LARGEST:
            return None
        return str(int(entry)) if entry == int(entry) else _digits_of(entry)
    # NaT, the missing date of pandas, is an instance of `date`, but does not equal itself.
    return str(entry) if isinstance(entry, datetime.date) and entry == entry else None


def _digits_of(number: float | decimal.Decimal) -> str:
    """Returns the decimal digits of a number with a fractional part, without trailing zeros."""
    exact = number if isinstance(number, decimal.Decimal) else decimal.Decimal(repr(number))
    # The default decimal context would round to 28 digits.
    precision, least, most = len(exact.as_tuple().digits), decimal.MIN_EMIN, decimal.MAX_EMAX
    return str(exact.normalize(decimal.Context(precision, Emin=least, Emax=most)))


@frozen_pytree
class Refused:
    """A column whose dtype no query supports. Other columns of its table remain usable.

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
    """Whether a node of a database is a `Numbers` or a `Texts`."""
    return isinstance(leaf, (Numbers, Texts))


def check_usable(column: PyTree) -> None:
    """Raises an error if a column has a dtype that no query supports."""
    if isinstance(column, Refused):
        column.refuse()


# Strings as arrays of letter codes, from 1 for a to 26 for z.


ALPHABET = string.ascii_lowercase


def codes_of(texts: Iterable[object], width: int) -> np.ndarray:
    """Returns the codes of the first `width` letters of each string, as shape (n, width).

    Shorter strings are padded with 0.
    """
    rows = [[*letters_of(text)[:width], *[0] * width][:width] for text in texts]
    return np.array(rows, np.uint8).reshape(-1, width)


def letters_of(text: object) -> list[int]:
    """Returns the codes of all letters a to z in a string, ignoring case.

    The list is empty for an object that is not a string.
    """
    folded = text.casefold() if isinstance(text, str) else ""
    return [ord(letter) - ord("a") + 1 for letter in folded if letter in ALPHABET]
