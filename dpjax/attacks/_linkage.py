"""`linkage`: identifies people in an anonymized table by columns that a public table also has."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key

if TYPE_CHECKING:
    import pandas
    from jax.typing import ArrayLike


Table: TypeAlias = "Mapping[str, ArrayLike] | pandas.DataFrame"


class Linkage(NamedTuple):
    """The rows of a public register that match each row of an anonymized table.

    Attributes:
        row: the matching row of the register, if both rows are unique in their tables; else -1.
        candidates: the number of matching rows of the register.

    Formal guarantees:
        None: this is an attack.
    """

    row: np.ndarray
    candidates: np.ndarray


def linkage(table: Table, register: Table, *, on: Sequence[str]) -> Linkage:
    """Joins an anonymized table with a public register on their quasi-identifiers.

    If the register lists everyone, a table row that matches only one row of the register belongs to
    that person.

    Args:
        table: columns by name, arrays of one length: a dict, or a DataFrame.
        register: the public table, in the same format as `table`, with other columns.
        on: names of shared columns, at least one.

    Returns:
        `Linkage`: one entry for each row of the table.

    Raises:
        TypeError: if `on` is not a sequence of names.
        ValueError: if a column is missing, or columns have no common length.

    Formal guarantees:
        If the register contains each person of the table once, with the same quasi-identifiers, no
        match is wrong.

    Source:
        Sweeney (2000): ZIP code, date of birth and sex; the medical records of Massachusetts in the
        lecture "A firm foundation for private data analysis".

    Example:
        >>> import dpjax
        >>> table = {"zip": [2138, 2139], "sex": [0, 1], "diagnosis": ["flu", "gout"]}
        >>> register = {"zip": [2139, 2138, 2138], "sex": [1, 0, 0], "name": ["Ann", "Bo", "Cy"]}
        >>> dpjax.attacks.linkage(table, register, on=["zip", "sex"]).row.tolist()
        [-1, 0]
    """
    anonymous, public = _columns("table", table, on), _columns("register", register, on)
    n = len(anonymous[0])
    codes = _codes([np.concatenate(both) for both in zip(anonymous, public, strict=True)])
    alike, known = codes[:n], codes[n:]
    kinds = codes.max(initial=-1) + 1
    candidates = np.bincount(known, minlength=kinds)[alike]
    only = (candidates == 1) & (np.bincount(alike, minlength=kinds)[alike] == 1)
    row_of = np.zeros(kinds, int)
    row_of[known] = np.arange(len(known))
    return Linkage(np.where(only, row_of[alike], -1), candidates)


def anonymity(table: Table, *, on: Sequence[str]) -> np.ndarray:
    """For each row of a table, the number of rows with equal quasi-identifiers, itself included.

    The table is k-anonymous, where k is the least of these numbers.

    Args:
        table: columns by name, arrays of one length: a dict, or a DataFrame.
        on: names of the quasi-identifiers, at least one.

    Returns:
        The counts, integers of shape (n,).

    Raises:
        TypeError: if `on` is not a sequence of names.
        ValueError: if a column is missing, or columns have no common length.

    Formal guarantees:
        None: k-anonymity does not limit what other columns, or other tables, reveal.

    Source:
        Sweeney, "k-anonymity: a model for protecting privacy" (2002).

    Example:
        >>> import dpjax
        >>> dpjax.attacks.anonymity({"zip": [2138, 2138, 2139]}, on=["zip"]).tolist()
        [2, 2, 1]
    """
    codes = _codes(_columns("table", table, on))
    return np.bincount(codes)[codes]


def _columns(name: str, table: Table, on: Sequence[str]) -> list[np.ndarray]:
    # A string is also a sequence of strings, so it is refused separately.
    if isinstance(on, str) or not all(isinstance(name, str) for name in on):
        raise TypeError(f"on must be a sequence of column names, got {_checks.shown(on)}")
    present = table if isinstance(table, Mapping) else list(getattr(table, "columns", ()))
    missing = [column for column in on if column not in present]
    if missing or not on:
        raise ValueError(f"{name} must have the columns {list(on)}, but lacks {missing}")
    for column in on:
        _checks.refuse_foreign_dtype(f"{name}[{column!r}]", table[column])
    columns = [np.asarray(table[column]) for column in on]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"{name} must have columns of equal length, got different lengths")
    return columns


def _codes(columns: list[np.ndarray]) -> np.ndarray:
    """Returns an integer code for each row, equal for rows that are equal in all columns."""
    codes = np.zeros(len(columns[0]), int)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        # Codes are renumbered after each column, so that they stay small and do not overflow.
        codes = np.unique(codes * len(values) + code, return_inverse=True)[1]
    return codes


# Percentages of the ages 0 to 4, 5 to 9, ..., 80 to 84, and 85 to 99 in the United States census of
# 2010.
_AGES = (6.5, 6.6, 6.7, 7.1, 7.0, 6.8, 6.5, 6.5, 6.8, 7.4, 7.2, 6.4, 5.4, 4.0, 3.0, 2.4, 1.9, 1.8)
_YEARS = (5,) * 17 + (15,)
_FEMALE = 0.508
_DAYS = 365


def synthetic_register(key: Key, n: int, *, zips: int, diagnoses: int = 4) -> dict[str, np.ndarray]:
    """Draws a register of fictitious people, on whom attacks do no harm.

    ZIP codes are equally likely, ages have the distribution of the census of 2010 in bands of five
    years, birthdays are uniform, and 50.8% are female, all independent. Diagnoses are uniform and
    independent of everything else. So other people's records reveal nothing about a person's
    diagnosis. Only an attack that uses this person's own record can guess the diagnosis with a
    probability above 1 / diagnoses.

    Args:
        key: a typed key.
        n: the number of people, at least 1.
        zips: the number of ZIP codes, at least 1.
        diagnoses: the number of diagnoses, at least 2.

    Returns:
        Columns of n integers: "zip", "birth_day" (days before the latest one, in years of 365),
        "female", "diagnosis".

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is out of range.

    Formal guarantees:
        The register contains no real person's data.

    Source:
        Age and sex: U.S. Census Bureau, 2010 census, rounded to .1%.

    Example:
        >>> import jax
        >>> import dpjax
        >>> people = dpjax.attacks.synthetic_register(jax.random.key(0), 1000, zips=2)
        >>> len(set(people["zip"].tolist())), bool(max(people["birth_day"]) < 100 * 365)
        (2, True)
    """
    n = _checks.integer("n", n, least=1)
    zips = _checks.integer("zips", zips, least=1)
    diagnoses = _checks.integer("diagnoses", diagnoses, least=2)
    # Uniform numbers in float32 are multiples of 2^-24, which is finer than the given percentages.
    place, age, day, sex, health = np.asarray(jax.random.uniform(key, (5, n)), np.float64)
    band = np.searchsorted(np.cumsum(_AGES)[:-1], 100 * age)
    people = {
        "zip": zips * place,
        "birth_day": _DAYS * (5 * band + np.asarray(_YEARS)[band] * day),
        "female": sex < _FEMALE,
        "diagnosis": diagnoses * health,
    }
    return {name: column.astype(int) for name, column in people.items()}
