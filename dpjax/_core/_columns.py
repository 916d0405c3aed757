"""Columns of any library of tables, as exact NumPy arrays: nothing is rounded, wrapped or guessed.

The dtype of a column decides how it is converted, not its entries: missing ones are private.
Libraries are known by their attributes, so none of them is imported, nor missed.

`Numbers` holds what no array of JAX does: 64 bits without x64, or some numbers that are missing.
"""

import contextlib
import datetime
import decimal
import functools
import hashlib
import math
import re
import string
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Database, PyTree


@frozen_pytree
class Numbers:
    """Numbers of one NumPy dtype, exact in any mode of JAX.

    Attributes:
        held: an array of them; those of 64 bits as words, uint32 with a last axis of 2.
        known: which of them are not missing; None if none can be.
        of_dtype: the NumPy dtype; of integers or booleans where some may be missing.
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
    """Refuses anything but one array of numbers of one of these shapes; None is any length."""
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


# What pandas, polars and Arrow call numbers of at most 64 bits.
_WIDTH = r"(8|16|32|64)"
_INTEGERS = re.compile(rf"(u?int{_WIDTH}|bool|boolean)(\[pyarrow\])?")
_FLOATS = re.compile(rf"(float{_WIDTH}?|double|halffloat|decimal.*)(\[pyarrow\])?")
_LARGEST = 10**400
_TEXTS = ("str", "string", "large_string", "string_view", "categorical")


@frozen_pytree
class Texts:
    """A column of texts as fingerprints of 128 bits, which compare like the texts.

    Attributes:
        words: uint32 of shape (n, 4); 0 where there is no text.
    """

    words: jax.Array | np.ndarray

    is_column: ClassVar = True  # For messages.

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the column."""
        return self.words.shape[:-1]

    def __eq__(self, other: object) -> Any:
        """Which of the texts are one text, so that a function of a record may ask."""
        if isinstance(other, str):
            other = Texts(fingerprints([other])[0])
        if not isinstance(other, Texts):
            raise TypeError(f"a column of texts compares with a text, got {_checks.shown(other)}")
        return jnp.all(self.words == other.words, axis=-1) & jnp.any(self.words != 0, axis=-1)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "texts"


def fingerprints(texts: Iterable[object]) -> np.ndarray:
    """The words of `Texts`, each computed from its own text alone."""

    @functools.cache  # A column repeats its texts, and to hash them takes longer than a release.
    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    digests = [bytes(16) if text is None else digest(text) for text in map(as_text, texts)]
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 4)


def as_text(entry: object) -> str | None:
    """An entry of a column of texts or objects; None if it is missing, or has no one text.

    Whole numbers count as their digits: a column of objects may hold numbers, and that is private.
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
        # Neither is NaN; and Python refuses to write thousands of digits.
        small = -_LARGEST < entry < _LARGEST
        return str(int(entry)) if small and entry == int(entry) else None
    # Pandas' mark of a missing date is a date, too, and differs from itself.
    return str(entry) if isinstance(entry, datetime.date) and entry == entry else None


def columns(name: str, database: Database) -> Database:
    """A database with tables as dicts of their columns, in NumPy arrays, `Numbers` and `Texts`.

    Raises:
        TypeError: if a dtype holds neither numbers nor texts; the message names the column.
        ValueError: if columns of a table share a name.
    """

    def tables(path: tuple[Any, ...], leaf: PyTree) -> PyTree:
        table = _columns_of_a_table(leaf)
        if table is leaf:
            return exact_column(place_of(name, path), leaf, named=bool(path))
        return {key: exact_column(place_of(name, (*path, key)), x) for key, x in table.items()}

    return jax.tree_util.tree_map_with_path(tables, database, is_leaf=is_column)


def is_column(leaf: PyTree) -> bool:
    """Whether a node of a database is a column that was converted."""
    return isinstance(leaf, (Numbers, Texts))


def place_of(name: str, path: tuple[Any, ...]) -> str:
    """What messages call a column: by its name, if it has one."""
    if not path:
        return name
    key = getattr(path[-1], "key", path[-1])
    if isinstance(key, (str, int)):
        return f"column {key!r} of {name}"
    return name + jax.tree_util.keystr(path)


def exact_column(place: str, leaf: PyTree, *, named: bool = True) -> PyTree:
    """One column in a dtype that does not depend on which of its entries are missing."""
    if is_column(leaf) or isinstance(leaf, (jax.Array, type)) or callable(leaf):
        return leaf
    _checks.refuse_masked(place, leaf)
    if _holds_texts(leaf):
        if not named:
            or_floats = ', or make floats by .astype("float64")' if _kind(leaf) == "object" else ""
            raise TypeError(
                f"{place} must be numbers, got the dtype {dtype_of(leaf)}: number its texts by a"
                " public list, as by pandas.Index(public).get_indexer(column), or pass a table"
                f" with this column and count its texts by dpjax.queries.by{or_floats}"
            )
        texts = texts_of(leaf)
        return Texts(fingerprints(texts.ravel()).reshape(*texts.shape, 4))
    if hasattr(leaf, "to_pylist") and hasattr(leaf, "type"):
        return _of_arrow(place, leaf)
    if hasattr(leaf, "to_arrow") and hasattr(leaf, "is_null"):
        return _of_polars(place, leaf)
    if hasattr(leaf, "isna") and hasattr(leaf, "to_numpy"):
        return _of_pandas(place, leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "mM":
        raise _refusal(place, leaf, '.astype("datetime64[s]").astype("int64")', ".astype(str)")
    return leaf


def _of_pandas(place: str, leaf: Any) -> np.ndarray | Numbers:
    dtype: Any = leaf.dtype
    if hasattr(dtype, "categories"):
        found = exact_column(place, dtype.categories)
        codes = np.asarray(leaf.cat.codes if hasattr(leaf, "cat") else leaf.codes)
        if isinstance(found, Numbers):  # No category is missing.
            found, _ = found.on_host()
        found = np.append(found, np.zeros(1, found.dtype))  # There may be no category.
        return _with_gaps(found[codes], codes >= 0)
    if isinstance(leaf.dtype, np.dtype) and dtype.kind in "iufb":
        return np.asarray(leaf)
    if _INTEGERS.fullmatch(_kind(leaf)):
        whole = np.dtype("bool" if "bool" in _kind(leaf) else dtype.numpy_dtype)
        return _with_gaps(leaf.to_numpy(whole, na_value=whole.type(0)), ~np.asarray(leaf.isna()))
    if _FLOATS.fullmatch(_kind(leaf)):
        wide = _kind(leaf).startswith("decimal")
        return leaf.to_numpy("float64" if wide else dtype.numpy_dtype, na_value=np.nan)
    is_time = isinstance(leaf.dtype, np.dtype) and dtype.kind in "mM"
    raise _refusal(place, leaf, f'.astype("{"int" if is_time else "float"}64")', ".astype(str)")


def _of_polars(place: str, leaf: Any) -> np.ndarray | Numbers:
    if _INTEGERS.fullmatch(_kind(leaf)):
        nothing = False if _kind(leaf) == "boolean" else 0
        return _with_gaps(leaf.fill_null(nothing).to_numpy(), ~leaf.is_null().to_numpy())
    if _FLOATS.fullmatch(_kind(leaf)):
        found = leaf.cast(float) if _kind(leaf).startswith("decimal") else leaf
        return found.fill_null(math.nan).to_numpy()
    raise _refusal(place, leaf, ".cast(polars.Float64)", ".cast(polars.String)")


def _of_arrow(place: str, leaf: Any) -> np.ndarray | Numbers:
    if hasattr(leaf.type, "value_type") and hasattr(leaf.type, "index_type"):
        return _of_arrow(place, leaf.cast(leaf.type.value_type))
    if _INTEGERS.fullmatch(_kind(leaf)):
        filled = leaf.fill_null(False if _kind(leaf) == "bool" else 0)
        missing = leaf.is_null().to_numpy(zero_copy_only=False)
        return _with_gaps(filled.to_numpy(zero_copy_only=False), ~missing)
    if _FLOATS.fullmatch(_kind(leaf)):
        found = leaf.cast("double") if _kind(leaf).startswith("decimal") else leaf
        return found.to_numpy(zero_copy_only=False)
    is_time = _kind(leaf).startswith(("date", "time"))
    as_numbers = '.cast("timestamp[s]").cast("int64")' if is_time else '.cast("double")'
    raise _refusal(place, leaf, as_numbers, '.cast("string")')


def _with_gaps(numbers: np.ndarray, known: np.ndarray) -> np.ndarray | Numbers:
    """Numbers of which some may be missing: floats have NaN for that."""
    if numbers.dtype.kind == "f":
        return np.where(known, numbers, numbers.dtype.type(np.nan))
    return Numbers.of(numbers, known)


def _refusal(place: str, leaf: Any, as_numbers: str, as_texts: str) -> TypeError:
    return TypeError(
        f"{place} must be numbers or texts, got the dtype {dtype_of(leaf)}: make it"
        f" numbers, by {as_numbers} where that is exact, or texts, by {as_texts}, or leave it out"
    )


def texts_of(leaf: PyTree) -> np.ndarray:
    """The entries of a column of texts, or of objects."""
    # NumPy forgets which texts of an Arrow dictionary are missing.
    return np.asarray(leaf.to_pylist() if hasattr(leaf, "to_pylist") else leaf, object)


def _holds_texts(leaf: PyTree) -> bool:
    """Whether a column holds texts, by its dtype alone: missing entries are private."""
    dtype = getattr(leaf, "dtype", None)
    categories = getattr(dtype, "categories", None)
    if hasattr(categories, "dtype") and not hasattr(leaf, "to_arrow"):
        return _holds_texts(categories)
    if isinstance(dtype, np.dtype):
        return dtype.kind in "UOT"
    name, *_ = _kind(leaf).removeprefix("dictionary<values=").split(",")
    return name.removesuffix("[pyarrow]") in _TEXTS or name.startswith("enum(")


def _kind(leaf: PyTree) -> str:
    """The name of a dtype of pandas or polars, or of a type of Arrow."""
    return str(dtype_of(leaf)).lower()


def dtype_of(leaf: PyTree) -> object:
    """The dtype of a column, which Arrow calls its type."""
    found = getattr(leaf, "dtype", getattr(leaf, "type", ""))
    # NumPy's own name says how long the longest text is.
    return "str" if isinstance(found, np.dtype) and found.kind == "U" else found


def _columns_of_groups(groups: PyTree) -> PyTree:
    """The columns of `frame.groupby("cut")["price"]`, a group and a number for each record."""
    name, values = groups.keys, groups.obj
    if groups.ndim != 1 or not isinstance(name, (str, int)):
        raise TypeError(
            "groups must be grouped by one column and reduced to one column, as in"
            ' frame.groupby("cut")["price"]; otherwise pass the frame itself, and name the columns'
        )
    # Take the column itself: pandas chooses the dtype of its index of groups by private values.
    grouper = groups._grouper if hasattr(groups, "_grouper") else groups.grouper  # pandas 2.1.
    return {name: grouper.groupings[0].grouping_vector, values.name: values}


def _columns_of_a_table(leaf: PyTree) -> PyTree:
    """The columns of a DataFrame, each with its own dtype; anything else stays as it is."""
    if isinstance(leaf, type):
        return leaf
    if hasattr(leaf, "ngroups") and hasattr(leaf, "indices"):
        return _columns_of_groups(leaf)
    if hasattr(leaf, "column_names"):  # Of Arrow.
        columns = list(leaf.column_names)
    elif hasattr(leaf, "columns") and hasattr(leaf, "dtypes"):
        columns = list(leaf.columns)
    else:
        return leaf
    if len(set(columns)) < len(columns):
        raise ValueError(
            f"columns of a table must have names of their own, got {_checks.shown(columns)}"
        )
    return {column: leaf[column] for column in columns}


ALPHABET = string.ascii_lowercase


def codes_of(texts: Iterable[object], width: int) -> np.ndarray:
    """The first letters of each text, 1 for a to 26 for z, and 0 after the end: (n, width)."""
    texts = list(texts)
    codes = np.zeros((len(texts), width), np.uint8)
    for row, text in zip(codes, texts, strict=True):
        letters = letters_of(text)[:width]
        row[: len(letters)] = letters
    return codes


def letters_of(text: object) -> list[int]:
    """The codes of all letters of a text; none for anything else."""
    folded = text.casefold() if isinstance(text, str) else ""
    return [ord(letter) - ord("a") + 1 for letter in folded if letter in ALPHABET]
