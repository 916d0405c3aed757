"""A published value, with its guarantee."""

from typing import Any

from jax.typing import ArrayLike

from dpjax._core._accuracy import UNKNOWN, Accuracy, Ends, interval
from dpjax._core._guarantee import Guarantee
from dpjax._core._pytree import frozen_pytree
from dpjax._core._release_text import described
from dpjax._core._saved import restored, saved
from dpjax._core._types import Value


@frozen_pytree
class Release:
    """A published value and the guarantee that it was published under; nothing private.

    Attributes:
        value: the noisy value.
        guarantee: of publishing it.
        accuracy: how far the value may be off, which `interval` reads.

    Formal guarantees:
        Holds neither the database nor the target's exact value, so it may be stored and sent.
        `accuracy` holds public parameters, and noisy numbers that the guarantee covers.
    """

    value: Value
    guarantee: Guarantee
    accuracy: Accuracy = UNKNOWN

    def interval(
        self,
        confidence: float = 0.95,
        *,
        simultaneous: bool = False,
        at_least: ArrayLike | None = None,
    ) -> Ends:
        """An interval around each number of the release that contains the truth.

        The truth is the number without noise: of the database at hand, with its records clamped to
        the public bounds. It is not that of a larger population: sampling adds to the error.

        Args:
            confidence: the probability that an interval contains the truth, in (0, 1).
            simultaneous: whether the confidence is for all intervals at once, instead of for each.
            at_least: for quantiles of a private number of records: at least so many there are, one
                number or one for each group, from public knowledge or from a release of counts. If
                that has a confidence of its own, both must hold.

        Returns:
            The low ends and the high ends, in float64 and of the structure of the value.

        Raises:
            TypeError: if the release is traced, or the confidence not a number.
            ValueError: if the confidence is out of range, or nothing is known of the error.

        Formal guarantees:
            Post-processing of the release and of public things. Each interval contains the truth
            with probability `confidence` at least, over the noise. Averages under
            add-or-remove-one, variances and covariances are functions of several noisy numbers:
            their intervals follow from intervals of these, which hold at once. The intervals of
            `private_linear_regression` and `private_pca` are simulated: a parametric bootstrap of
            the release, which is right where noise is small against what decides. For a component
            that is the gap between its variance and the next, for weights the least eigenvalue of
            the system. Where the released gap is below three times the error of eigenvalues, a
            component may be anything in [-1, 1], a variance is within that error (Weyl), and the
            ends of weights are infinite.
            `quantile_scores` needs several quantiles, n or `at_least`, and every record a number of
            the grid.

        Source:
            Efron and Tibshirani, "An introduction to the bootstrap" (1993), for simulated ones.

        Example:
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> low, high = release.interval()
            >>> float(high - low)
            6.0
        """
        return interval(self.value, self.accuracy, confidence, simultaneous, at_least)

    def to_dict(self) -> dict[str, Any]:
        """The release as a dict that JSON holds: `json.dumps(release.to_dict())`.

        Returns:
            A dict of value, guarantee, accuracy (what is publicly known of the mechanism and its
            noise), interval (of 95%, None where none is known), dpjax (the version), format, and
            sha256 (of the other parts).

        Raises:
            TypeError: if the release is traced, or its value holds something else than numbers,
                texts, arrays, lists, tuples, and dicts with names as keys.
            ValueError: if the release is a batch, or its guarantee holds NaN.

        Formal guarantees:
            Holds nothing private. `Release.from_dict` gives the same bits: floats are written with
            all digits, arrays with their dtypes, and NaN and infinities by name.

        Source:
            None.

        Example:
            >>> import json
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> text = json.dumps(release.to_dict())
            >>> dpjax.Release.from_dict(json.loads(text))
            Release(50 ± 3 (95%), (epsilon=1, delta=0)-DP, under replace-one, seeded key)
        """
        return saved(self.value, self.guarantee, self.accuracy)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Release":
        """The release that `to_dict` was made of.

        Args:
            saved: by `to_dict`, of this version of the format.

        Returns:
            A `Release`. Arrays are NumPy's where JAX lacks their dtype: float64 without x64.

        Raises:
            ValueError: if the dict was changed, or was made by a newer dpjax, or holds no release.

        Formal guarantees:
            The numbers of the guarantee are checked as `Guarantee` checks them, and its gamma
            against its samplings. The sha256 finds changes by accident. Nothing is signed: who can
            write the file can write another release.

        Source:
            None.

        Example:
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> changed = release.to_dict() | {"value": 49}
            >>> dpjax.Release.from_dict(changed)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: saved was changed after Release.to_dict made it, or lost a part: ...
        """
        return cls(*restored(saved))

    def __repr__(self) -> str:
        return f"Release({described(self.value, self.accuracy)}, {self.guarantee!r})"
