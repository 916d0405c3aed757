"""A synthetic register of people, with marginals like those of a census."""

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key

# Percentages of ages 0 to 4, 5 to 9, ..., 85 to 99 in the United States, census of 2010.
_AGES = (6.5, 6.6, 6.7, 7.1, 7.0, 6.8, 6.5, 6.5, 6.8, 7.4, 7.2, 6.4, 5.4, 4.0, 3.0, 2.4, 1.9, 1.8)
_YEARS = (5,) * 17 + (15,)
_FEMALE = 0.508
_DAYS = 365


def synthetic_register(key: Key, n: int, *, zips: int, diagnoses: int = 4) -> dict[str, np.ndarray]:
    """Draws people who do not exist, for attacks that hurt nobody.

    ZIP codes are equally likely, ages come from the census of 2010 in bands of five years,
    birthdays are uniform, and 50.8% are female, all independent. Diagnoses are uniform and
    independent of the rest. So statistics about others say nothing about a person's diagnosis: an
    attacker who guesses better than 1 / diagnoses has learned from that person's record.

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
        ValueError: if one is out of range.

    Formal guarantees:
        The register holds nobody's data.

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
    # float32 has steps of 2^-24, finer than every marginal.
    place, age, day, sex, health = np.asarray(jax.random.uniform(key, (5, n)), np.float64)
    band = np.searchsorted(np.cumsum(_AGES)[:-1], 100 * age)
    people = {
        "zip": zips * place,
        "birth_day": _DAYS * (5 * band + np.asarray(_YEARS)[band] * day),
        "female": sex < _FEMALE,
        "diagnosis": diagnoses * health,
    }
    return {name: column.astype(int) for name, column in people.items()}
