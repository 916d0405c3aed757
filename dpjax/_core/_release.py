"""`Release`, a published value with its guarantee: printing, intervals, JSON and tables."""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _accuracy, _checks
from dpjax._core._accuracy import CONFIDENCE, Accuracy, Ends
from dpjax._core._guarantee import (
    NUMBERS,
    RECORD,
    Guarantee,
    NeighboringRelation,
    SampledEvent,
    concrete,
)
from dpjax._core._labels import FOUND, Labels, frame_of, html_of, rows_of, titles_of
from dpjax._core._moments import Moments
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._training_record import TrainingRecord, card_of
from dpjax._core._types import PyTree, Value
from dpjax._version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# If a release has more numbers than this, printing does not simulate their intervals.
_MOST_SIMULATED = 500
_MOST_SHOWN = 6
# Contains one function, which plots a release. `dpjax.plotting` adds this function, because `_core`
# must not import `dpjax.plotting`.
PLOT_OF_RELEASE: list[Callable[..., Any]] = []


def described(value: Value, accuracy: Accuracy, labels: Labels | None) -> str:
    """Returns a value as text, with its interval if one is known, such as `3.2 ± 0.4 (95%)`."""
    is_array = hasattr(value, "dtype") and np.size(value) > 0 and not _checks.any_traced(value)
    if accuracy.kind == "" and labels is not None and is_array:
        return f"[{' '.join(labels.texts(np.ravel(value)[:_MOST_SHOWN]))}]"
    measured = jax.tree.leaves(accuracy.measured)
    simulated = bool(accuracy.facts.get("simulated"))
    slow = simulated and sum(np.size(leaf) for leaf in measured) > _MOST_SIMULATED
    if slow or _checks.any_traced(measured, value):
        return repr(value)
    if (ends := _accuracy.known_interval(value, accuracy)) is None:
        return repr(value)
    centers = jax.tree.map(np.asarray, _accuracy.estimate(value, accuracy))
    printed = functools.partial(_with_ends, labels.moments if labels else "")
    texts = jax.tree.map(printed, centers, *ends)
    how = f"({CONFIDENCE:.0%}{', simulated' if simulated else ''})"
    if jax.tree_util.all_leaves([value]):
        return f"{texts} {how}"
    paths, _ = jax.tree_util.tree_flatten_with_path(texts)
    named = (
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}: {text}" for path, text in paths
    )
    return f"{', '.join(named)} {how}"


def _with_ends(moments: str, center: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """Returns the text of numbers with their largest error, such as "3.2 ± 0.4".

    If `moments` is not empty, the numbers are shown as dates, times or durations. A single number
    whose interval is asymmetric is shown with the interval instead of the error.
    """
    below, above = center - low, high - center
    reach = float(np.max(np.maximum(below, above), initial=0.0))
    if moments and math.isfinite(reach):
        most = 3 if center.size > _MOST_SHOWN else center.size
        return Moments(moments).with_reach(center, reach, most)
    if math.isnan(reach):
        return np.array2string(center)
    if math.isinf(reach):  # Nothing is known about at least one of the numbers.
        every = bool(np.all(np.isinf(np.maximum(below, above))))
        return f"{_array(center, 0.0)} {'±' if every else '± up to'} inf"
    step = 10.0 ** (math.floor(math.log10(reach)) - 1) if reach > 0 else 0.0
    if step > 0 and np.all(center % 1 == 0) and reach % 1 == 0:
        step = max(step, 1.0)
    if center.ndim == 0 and abs(below - above) > 0.1 * reach:
        ends = (
            f"[{_rounded(float(low), step, math.floor)}, {_rounded(float(high), step, math.ceil)}]"
        )
        return f"{_rounded(float(center), step, round)} in {ends}"
    shown = _array(center, step)
    # Printed numbers are rounded to multiples of `step`, so the printed error is larger by half a
    # step.
    exact = step == 0 or bool(np.all(np.round(center / step) * step == center))
    sign = "±" if np.all(np.maximum(below, above) >= 0.9 * reach) else "± up to"
    return f"{shown} {sign} {_rounded(reach + (0 if exact else step / 2), step, math.ceil)}"


def _rounded(number: float, step: float, rounding: Callable[[float], int]) -> str:
    """Returns a number as text, rounded to a multiple of `step`, a power of ten."""
    if step == 0:
        return f"{number:g}"
    # Rounding errors of the division must not move a multiple of `step` to the next multiple. So a
    # quotient that is an integer, up to these errors, is treated as this integer.
    times = number / step
    near = round(times)
    whole = near if abs(times - near) < 1e-9 * max(1, abs(times)) else rounding(times)
    digits = max(0, -round(math.log10(step)))
    return f"{whole * step:.{digits}f}"


def _array(center: np.ndarray, step: float) -> str:
    if center.ndim == 0:
        return _rounded(float(center), step, round)
    flat = [_rounded(float(x), step, round) for x in center.ravel()[: _MOST_SHOWN + 1]]
    if center.size <= _MOST_SHOWN:
        return f"[{' '.join(flat)}]"
    return f"[{' '.join(flat[:3])} ...] of shape {center.shape}"


# Format 2 is for guarantees about records, and format 3 for all other privacy units. Older versions
# of dpjax, which would ignore the unit, read only format 2. Format 1, in which sums were integers,
# is no longer supported.
_OF_RECORDS, _OF_OTHER_UNITS = 2, 3
_PARTS = ("format", "dpjax", "value", "guarantee", "accuracy", "interval")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def guarantee_to_json(guarantee: Guarantee) -> dict[str, Any]:
    """Returns a guarantee as a dict for JSON, with all digits of its numbers."""
    known = concrete(guarantee)
    numbers = {name: _number_to_json(getattr(known, name)) for name in NUMBERS}
    # The last entry of an event, `records`, is left out if it is None.
    fields = [tuple(vars(event).values()) for event in known.events]
    events = [event if event[-1] is not None else event[:-1] for event in fields]
    parts = {**vars(known), **numbers, "events": events, "relation": known.relation.value}
    if known.replacing is None:
        del parts["replacing"]
    if known.privacy_unit == RECORD:
        del parts["privacy_unit"]
    return parts


def guarantee_from_json(stored: dict[str, Any]) -> Guarantee:
    """Returns the guarantee that `guarantee_to_json` converted, after checking all numbers."""
    guarantee = Guarantee(
        **{name: _number_from_json(stored[name]) for name in NUMBERS},
        events=tuple(SampledEvent(*event) for event in stored["events"]),
        relation=NeighboringRelation(stored["relation"]),
        notes=tuple(map(str, stored["notes"])),
        group_size=stored["group_size"],
        replacing=_replacing(stored.get("replacing")),
        privacy_unit=stored.get("privacy_unit", RECORD),
    )
    if any(event.gamma > guarantee.gamma for event in guarantee.events):
        raise ValueError(
            "the gamma of a guarantee must be at least the gamma of each of its events, got"
            f" {guarantee.gamma}"
        )
    if any(_is_weaker(event.confidence, guarantee.confidence) for event in guarantee.events):
        raise ValueError(
            "the confidence of a guarantee must be at most the confidence of each of its events,"
            f" got {guarantee.confidence}"
        )
    return concrete(guarantee)


def _is_weaker(confidence: Any, other: Any) -> bool:
    """Whether a confidence states less than another. None (marginal) states the least."""
    return other is not None and (confidence is None or confidence < other)


def _replacing(stored: Any) -> tuple[float, float, float, float] | None:
    if stored is None:
        return None
    first, second, third, fourth = map(float, stored)
    return first, second, third, fourth


def tree_to_json(tree: PyTree) -> Any:
    """Converts a pytree of dicts, lists and tuples to JSON, with dtypes and shapes of arrays."""
    if isinstance(tree, str):
        return {"text": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float)):
        return _number_to_json(tree)
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        _checks.host_only("to_dict", tree, "the release as it is")
        _check_real(tree.dtype)
        array = np.asarray(tree)
        data = [_number_to_json(number) for number in array.ravel().tolist()]
        return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: tree_to_json(part) for name, part in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [tree_to_json(part) for part in tree]}
    raise TypeError(
        "value must consist of arrays, numbers, strings, lists, tuples and dicts with strings as"
        f" keys, to be saved as JSON, got {type(tree).__name__}: extract its arrays by"
        " dpjax.accounting.post_process, or pickle the release"
    )


def tree_from_json(stored: Any) -> PyTree:
    """Restores a pytree from the JSON of `tree_to_json`.

    Arrays whose dtype JAX does not have without x64 become NumPy arrays.
    """
    if not isinstance(stored, dict):
        return _number_from_json(stored)
    if "dtype" in stored:
        return _array_from_json(stored)
    ((kind, parts),) = stored.items()
    if kind == "text":
        return str(parts)
    if kind == "dict":
        return {str(name): tree_from_json(part) for name, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](map(tree_from_json, parts))


def _array_from_json(stored: dict[str, Any]) -> jax.Array | np.ndarray:
    dtype = jnp.dtype(stored["dtype"])
    _check_real(dtype)
    flat = [_number_from_json(number) for number in stored["data"]]
    array = np.array(flat, dtype).reshape(stored["shape"])
    return jnp.asarray(array) if jax.dtypes.canonicalize_dtype(dtype) == dtype else array


def _check_real(dtype: np.dtype) -> None:
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(f"value must contain real numbers, got an array of dtype {dtype}")


def _number_to_json(number: Any) -> Any:
    """Returns a number for JSON. NaN and infinities, which JSON does not have, become strings."""
    is_finite = not isinstance(number, float) or math.isfinite(number)
    return number if is_finite else json.dumps(number)


def _number_from_json(stored: Any) -> Any:
    if isinstance(stored, str):
        return _NOT_FINITE[stored]
    if stored is None or isinstance(stored, (bool, int, float)):
        return stored
    raise TypeError(f"saved must be unchanged, got {_checks.shown(stored)} in place of a number")


def _interval_to_json(value: Value, accuracy: Accuracy) -> Any:
    """Returns the 95% interval of a release, for programs that are not written in Python.

    `Release.from_dict` ignores this entry, because dpjax can compute the interval again.
    """
    if (ends := _accuracy.known_interval(value, accuracy)) is None:
        return None
    low, high = (tree_to_json(jax.tree.map(np.asarray, end)) for end in ends)
    return {"confidence": CONFIDENCE, "low": low, "high": high}


def _digest(parts: dict[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@frozen_pytree
class Release:
    """A published value with its guarantee. It contains nothing private.

    Attributes:
        value: the noisy value.
        guarantee: the guarantee of publishing it.
        accuracy: a description of the error of the value; used by `interval`.
        labels: public labels of the numbers, which `to_frame` and `plot` show; None if there are
            no labels.
        training: the public facts of a training by `learning.fit`; None for other releases.

    It prints as `Release(3.2 ± 0.4 (95%), guarantee)`, with an interval for each single number. It
    prints `± up to 0.4` if intervals differ in length, `3.2 in [2.5, 3.6]` if an interval is not
    symmetric, and `simulated` if intervals come from a simulation. If no interval is known, only
    the value prints.

    Formal guarantees:
        A release contains neither the database nor the target's exact value, so it may be stored
        and sent. `accuracy` contains public parameters, and noisy numbers that the guarantee
        covers.
    """

    value: Value
    guarantee: Guarantee
    accuracy: Accuracy = _accuracy.UNKNOWN
    labels: Labels | None = static(default=None)
    training: TrainingRecord | None = static(default=None)

    def interval(
        self,
        confidence: float = 0.95,
        *,
        simultaneous: bool = False,
        at_least: ArrayLike | None = None,
    ) -> Ends:
        """For each number of the release, an interval that contains the true number.

        The truth is the number without noise, for this database with its records clamped to the
        public bounds. As an estimate for a larger population, the release also has a sampling
        error, which is not included.

        Args:
            confidence: the probability that an interval contains the truth, in (0, 1).
            simultaneous: whether the confidence is for all intervals at once, instead of for each.
            at_least: for quantiles of a private number of records: a lower bound on this number, or
                an array with a lower bound for each group, from public knowledge or from a release
                of counts. The interval is valid if the lower bound is true.

        Returns:
            The lower ends and the upper ends, in float64, each with the structure of the value.

        Raises:
            TypeError: if the release is traced, or the confidence is not a number.
            ValueError: if the confidence is out of range, or the error is unknown.

        Formal guarantees:
            An interval is post-processing of the release and of public facts. Each interval
            contains the truth with probability at least `confidence` over the noise.

            Averages under add-or-remove-one, variances and covariances are functions of several
            noisy numbers. Their intervals follow from simultaneous intervals of these numbers.

            The intervals of `private_linear_regression` and `private_pca` come from a parametric
            bootstrap of the release. They are valid if the noise is small: for components, compared
            with the gap between a component's variance and the next variance; for weights, compared
            with the least eigenvalue of the system. If the released gap is below three times the
            error of the eigenvalues, intervals are conservative: [-1, 1] for a component, the value
            plus or minus this error for a variance (Weyl), and infinite for weights.

            Intervals of `quantile_scores` need several quantiles, and n or `at_least`. They assume
            that every record is a number of the grid.

        Source:
            Efron and Tibshirani, "An introduction to the bootstrap" (1993), for simulated
            intervals.

        Example:
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> low, high = release.interval()
            >>> float(high - low)
            6.0
        """
        return _accuracy.interval(self.value, self.accuracy, confidence, simultaneous, at_least)

    def to_dict(self) -> dict[str, Any]:
        """The release as a dict that can be written as JSON: `json.dumps(release.to_dict())`.

        Returns:
            A dict. Its keys are value, guarantee, accuracy (public facts about the mechanism and
            its noise), interval (95%; None if unknown), dpjax (the version), format, and sha256 (a
            hash of the other entries). If there are labels, labels is a key, too. If `learning.fit`
            made the release, training is a key, too: steps, sampling, clip norm, noise multiplier,
            optimizer and versions.

        Raises:
            TypeError: if the release is traced, or if its value contains anything but numbers,
                strings, arrays, lists, tuples, and dicts with strings as keys.
            ValueError: if the release is a batch, or if its guarantee contains NaN.

        Formal guarantees:
            The dict contains nothing private. `Release.from_dict` restores the same bits: floats
            are written with all digits, arrays with their dtypes, and NaN and infinities by name.

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
        value, accuracy = self.value, self.accuracy
        parts: dict[str, Any] = {
            "format": _OF_RECORDS if self.guarantee.privacy_unit == RECORD else _OF_OTHER_UNITS,
            "dpjax": __version__,
            "value": tree_to_json(value),
            "guarantee": guarantee_to_json(self.guarantee),
            "accuracy": {
                "kind": accuracy.kind,
                "public": accuracy.facts,
                "measured": tree_to_json(accuracy.measured),
            },
            "interval": _interval_to_json(value, accuracy),
        }
        # JSON converts tuples to lists. Labels and training are converted here already, so that
        # this dict has the same hash as the dict that will be read from the JSON file.
        for name, more in (("labels", self.labels), ("training", self.training)):
            if more is not None:
                parts[name] = json.loads(json.dumps(more.to_json()))
        return {**parts, "sha256": _digest(parts)}

    def card(self) -> str:
        """A card for readers of the release, in Markdown.

        Returns:
            The guarantee in words, what it does not promise, and for a release of `learning.fit`
            also what an attacker can learn, and how the model was trained.

        Raises:
            ModuleNotFoundError: if the release is the result of a training, and dp-accounting
                (extra `accounting`) is not installed.
            ValueError: if the release is a batch, or if its guarantee contains NaN.

        Formal guarantees:
            The card contains nothing private: it is computed from the guarantee and from public
            facts. Its bounds on what an attacker can learn are those of `accounting.dp_sgd_risk`.

        Source:
            Mitchell et al., "Model cards for model reporting" (2019).

        Example:
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> print(release.card().splitlines()[0])
            # Privacy of this release
        """
        return card_of(self.guarantee, self.training)

    def to_frame(self) -> "pd.DataFrame":
        """The numbers as a pandas DataFrame: one row for each, with its 95% interval.

        Returns:
            A DataFrame with the columns value, low and high. Its index identifies each number by
            the keys of its group, the name of its array in the value, and the position along other
            axes. If no interval is known, there are no columns low and high.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
            TypeError: if the release is traced.

        Formal guarantees:
            This is post-processing of the release, like `interval`.

        Source:
            None.

        Example:
            >>> import jax.numpy as jnp
            >>> import dpjax
            >>> counts = dpjax.laplace(1.0, 1.0)(dpjax.random.seeded_key(0), jnp.array([3, 50]))
            >>> list(counts.to_frame().columns)
            ['value', 'low', 'high']
        """
        return frame_of(rows_of(self.value, self.accuracy, self.labels))

    def plot(self, *, ax: "Axes | None" = None) -> "Axes":
        """Plots the numbers with their 95% intervals by `dpjax.plotting.release_with_error`.

        Args:
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            TypeError: if the value is not an array of numbers.

        Formal guarantees:
            This is post-processing of the release, like `interval`.

        Source:
            None.

        Example:
            >>> import jax.numpy as jnp
            >>> import dpjax
            >>> counts = dpjax.laplace(1.0, 1.0)(dpjax.random.seeded_key(0), jnp.array([3, 50]))
            >>> counts.plot().get_ylabel()
            'value'
        """
        return PLOT_OF_RELEASE[0](self, ax=ax)

    def _repr_html_(self) -> str:
        """Returns the HTML table that notebooks show."""
        above = self.labels.statistic if self.labels else "Release"
        if _checks.any_traced(self.value):
            return html_of([], [], above, repr(self))
        try:
            rows = rows_of(self.value, self.accuracy, self.labels)
        except (TypeError, IndexError):  # The value is not a pytree of numbers.
            return html_of([], [], above, repr(self))
        titles = titles_of(rows)
        cells = [[row.get(title, "") for title in titles] for row in rows]
        return html_of(titles, cells, above, repr(self.guarantee))

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Release":
        """The release that `to_dict` saved.

        Args:
            saved: the dict made by `to_dict`, of this version of the format.

        Returns:
            A `Release`. Arrays whose dtype JAX lacks, such as float64 without x64, are NumPy
            arrays.

        Raises:
            ValueError: if the dict was changed, was made by a newer dpjax, or does not contain a
                release.

        Formal guarantees:
            The numbers of the guarantee are checked as in `Guarantee`. Its gamma must not be below
            the gamma of any of its events. The sha256 detects accidental changes. Nothing is
            signed: anyone who can write the file can write another release.

        Source:
            None.

        Example:
            >>> import dpjax
            >>> release = dpjax.laplace(1.0, epsilon=1.0)(dpjax.random.seeded_key(0), 50)
            >>> changed = release.to_dict() | {"value": 49}
            >>> dpjax.Release.from_dict(changed)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: saved must be unchanged since Release.to_dict made it, ...
        """
        if not isinstance(saved, dict) or not {"format", "sha256"} <= saved.keys():
            raise ValueError(
                f"saved must be a dict that Release.to_dict returned, got {_checks.shown(saved)}"
            )
        if saved["format"] not in (_OF_RECORDS, _OF_OTHER_UNITS):
            raise ValueError(
                f"saved was written in format {_checks.shown(saved['format'])} by dpjax"
                f" {_checks.shown(saved.get('dpjax'))}, but this is dpjax {__version__}, which"
                f" reads formats {_OF_RECORDS} and {_OF_OTHER_UNITS}: install the version that"
                " wrote it"
            )
        parts = {name: part for name, part in saved.items() if name != "sha256"}
        if set(parts) - {"labels", "training"} != set(_PARTS) or saved["sha256"] != _digest(parts):
            raise ValueError(
                "saved must be unchanged since Release.to_dict made it, but its sha256 does not "
                "match, so its guarantee cannot be trusted. Save the release again"
            )
        try:
            about = parts["accuracy"]
            if not _accuracy.is_kind(about["kind"]):
                raise ValueError(
                    f"accuracy must be of a known kind, got {_checks.shown(about['kind'])}: it may "
                    "come from a newer version of dpjax"
                )
            return cls(
                tree_from_json(parts["value"]),
                guarantee_from_json(parts["guarantee"]),
                Accuracy.of(about["kind"], about["public"], tree_from_json(about["measured"])),
                Labels.from_json(parts["labels"]) if "labels" in parts else None,
                TrainingRecord.from_json(parts["training"]) if "training" in parts else None,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"saved does not contain a release: {error}") from error

    def __repr__(self) -> str:
        found = FOUND + self.labels.found if self.labels and self.labels.found else ""
        value = described(self.value, self.accuracy, self.labels)
        return f"Release({value}{found}, {self.guarantee!r})"
