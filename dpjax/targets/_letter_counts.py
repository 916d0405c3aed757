"""`letter_counts`: counts of letters in texts, as scores for selecting a frequent letter."""

from collections.abc import Iterable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import ALPHABET, codes_of
from dpjax._core._types import Database, PyTree, Value
from dpjax.targets._known_sensitivity import BoundedSum


def encode_text(texts: Iterable[str], *, width: int) -> np.ndarray:
    """Encodes texts as the records of a database: the codes of their first letters.

    Upper case counts as lower case. Characters other than the letters a to z are ignored. Letters
    after the first `width` letters are dropped, which bounds the influence of a text.

    Args:
        texts: n strings. Anything else, such as a missing value, counts as an empty text.
        width: the number of letters of a text that are used, at least 1, public.

    Returns:
        Shape (n, width), uint8: 1 for a to 26 for z, and 0 after the end of a text.

    Raises:
        TypeError: if `texts` is a single string, or the width is not an integer.
        ValueError: if the width is below 1.

    Formal guarantees:
        Every text becomes one record, whatever it contains. So databases that differ in one text
        differ in one record.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017), the
        example of the exponential mechanism.

    Example:
        >>> from dpjax import targets
        >>> targets.encode_text(["Ada", "Bo!"], width=3).tolist()
        [[1, 4, 1], [2, 15, 0]]
    """
    width = _checks.integer("width", width, least=1)
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts must be a sequence of strings, got {type(texts).__name__}")
    return codes_of(texts, width)


def letter_counts(*, width: int) -> BoundedSum:
    """A target that counts how often each letter occurs in all texts together.

    f(D)_j is how many entries of the database equal j + 1, for j = 0, ..., 25. With these counts as
    scores, `dpjax.exponential` selects a frequent letter: index 0 means a, and index 25 means z.

    Args:
        width: the number of letters of a text that are used, at least 1.

    Returns:
        A target with a known `sensitivity`, by default in linf. It maps integer codes of shape
        (n, width), from `encode_text`, to integer counts of shape (26,). Codes outside of 1 to 26
        are ignored.

    Raises:
        TypeError: if the width is not an integer; on a database, if it does not contain integers.
        ValueError: if the width is below 1; on a database, if it does not have shape (n, width), or
            n times the width exceeds the range of JAX's integers: 2^31 without x64.

    Formal guarantees:
        Replacing a text changes the counts by at most width in linf, 2 width in l1 and sqrt(2)
        width in l2, because the counts of a text are at least 0 and add up to at most width. Two
        texts that each repeat a single letter attain these bounds. The counts are integers, so
        there is no rounding error, and the order of the records does not matter.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017), the
        example of the exponential mechanism.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> codes = targets.encode_text(["Ada", "Bo"], width=10)
        >>> target = targets.letter_counts(width=10)
        >>> target(jnp.asarray(codes))[:5].tolist()
        [2, 1, 0, 1, 0]
        >>> target.sensitivity("linf").value
        10.0
    """
    width = _checks.integer("width", width, least=1)

    def count(record: PyTree) -> jax.Array:
        if jnp.shape(record) != (width,):
            raise ValueError(f"records must have width {width}, got shape {jnp.shape(record)}")
        if not jnp.issubdtype(record.dtype, jnp.integer):
            raise TypeError(f"records must be integer codes, got dtype {record.dtype}")
        # In a narrow dtype, the comparison with the codes of all letters could wrap around.
        codes = record if record.dtype.itemsize >= 4 else record.astype(jnp.int32)
        letters = jnp.arange(1, len(ALPHABET) + 1, dtype=codes.dtype)
        return jnp.sum(codes[None, :] == letters[:, None], axis=1, dtype=int)

    # Replacing a text lowers one count and raises another by at most `width`, for any number of
    # texts.
    each = [Fraction(width)] * 2
    norms = "linf", "l1", "l2"
    return _Counts(count, lambda x: x, False, bound=lambda n, dtype: each, norms=norms)


class _Counts(BoundedSum):
    reads = "integers"  # Clamping 64-bit integers to int32 does not produce new codes of letters.

    def __call__(self, database: Database) -> Value:
        most = jnp.iinfo(jnp.result_type(int)).max
        if database.size > most:
            raise ValueError(f"n times the width must be at most {most}, got {database.size}")
        return super().__call__(database)
