"""Public labels for the numbers of a release, and tables of labels, numbers and intervals."""

import dataclasses
import html
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, estimate, known_interval
from dpjax._core._moments import Moments
from dpjax._core._types import PyTree, Value

Axis: TypeAlias = tuple[str, tuple[Any, ...]]
"""The name of an axis, and a string or number for each index along this axis."""

_MOST_ROWS = 60  # The largest number of rows in an HTML table.
_NUMBERS = ("value", "low", "high")
# In a statistic's name, the text after these words is the range that its release has found.
FOUND = ", found in "


@dataclasses.dataclass(frozen=True)
class Labels:
    """Public names for the numbers of a release, such as the names of its groups.

    Attributes:
        statistic: the name of the statistic with its columns, such as "mean of price".
        groups: the labels of the leading axes, which all arrays of the release share.
        axes: the labels of the remaining axes of each array, by the array's name. The name is "" if
            the value is a single array.
        moments: the kind of `Moments` that the numbers represent: "dates", "times" or "durations";
            "" for other numbers.
    """

    statistic: str
    groups: tuple[Axis, ...] = ()
    axes: tuple[tuple[str, tuple[Axis, ...]], ...] = ()
    moments: str = ""

    @property
    def found(self) -> str:
        """The range that the release estimated for the column, as text; "" if it is public."""
        return self.statistic.partition(FOUND)[2]

    def axes_of(self, part: str, ndim: int) -> list[Axis | None]:
        """Returns the name and labels of each axis of an array; None for an axis without labels."""
        known = [*self.groups, *dict(self.axes).get(part, ())][:ndim]
        return [*known, *[None] * (ndim - len(known))]

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Returns numbers as short strings; dates and times are cut to the day."""
        if self.moments in ("", "durations"):
            return [f"{number:g}" for number in numbers]
        return np.datetime_as_string(Moments(self.moments).exact(numbers), unit="D").tolist()

    def to_json(self) -> dict[str, Any]:
        """Returns a dict that can be written as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Labels":
        """Returns the labels that `to_json` converted to a dict."""
        parts = tuple((str(part), _axes(axes)) for part, axes in stored["axes"])
        moments = str(stored.get("moments", ""))
        return cls(str(stored["statistic"]), _axes(stored["groups"]), parts, moments)


def _axes(stored: list[Any]) -> tuple[Axis, ...]:
    return tuple((str(name), tuple(places)) for name, places in stored)


def rows_of(value: Value, accuracy: Accuracy, labels: Labels | None) -> list[dict[str, Any]]:
    """Returns one dict for each number of a release: its labels, the number, its interval."""
    if hasattr(value, "columns"):
        raise TypeError(
            "release must have numbers as its value, got a table: use release.value, which is "
            "already a table"
        )
    for leaf in jax.tree.leaves(value):
        _checks.host_only("to_frame", leaf, "the value")
    if _is_ranking(value):
        return [{"rank": rank, "value": key} for rank, key in enumerate(value, 1)]
    if isinstance(value, dict) and all(map(_is_ranking, value.values())):
        names = [name for name, _ in labels.groups] if labels else []
        return [
            {**_words(names, group), "rank": rank, "value": key}
            for group, keys in value.items()
            for rank, key in enumerate(keys, 1)
        ]
    named, _ = jax.tree_util.tree_flatten_with_path(_numbers(value, accuracy))
    # If no interval is known for this release, its rows have no entries "low" and "high".
    sides = map(jax.tree.leaves, known_interval(value, accuracy) or ())
    each = list(zip(*sides, strict=True)) or [()] * len(named)
    found: list[dict[str, Any]] = []
    for (path, leaf), ends in zip(named, each, strict=True):
        part = jax.tree_util.keystr(path, simple=True, separator=".")
        found += _rows_of_array(part, np.asarray(leaf), ends, labels or Labels(""))
    return found


def _is_ranking(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(x, (int, str)) for x in value)


def _words(names: Sequence[str], group: Any) -> dict[str, Any]:
    """Maps the names of columns to the keys that identify a group."""
    keys = group if isinstance(group, tuple) else (group,)
    return dict(zip(names or [f"axis {i}" for i in range(len(keys))], keys, strict=True))


def _numbers(value: Value, accuracy: Accuracy) -> PyTree:
    """Returns the numbers that have intervals. Floats become float64; integers keep their dtype."""
    found = estimate(value, accuracy)
    exact = jax.tree.map(np.asarray, value)
    return jax.tree.map(lambda x, y: y if y.dtype.kind in "iub" else x, found, exact)


def _rows_of_array(
    part: str, numbers: np.ndarray, ends: Ends | tuple[()], labels: Labels
) -> Iterator[dict[str, Any]]:
    axes = labels.axes_of(part, numbers.ndim)
    for place in np.ndindex(numbers.shape):
        words = {
            (axis[0] if axis else f"axis {i}"): (axis[1][at] if axis else at)
            for i, (axis, at) in enumerate(zip(axes, place, strict=True))
        }
        named = {"part": part} if part else {}
        sides = zip(("low", "high"), ends, strict=False)
        found = {"value": numbers[place].item(), **{side: float(end[place]) for side, end in sides}}
        if labels.moments:
            exact = Moments(labels.moments).exact
            found = {name: exact(np.array([number]))[0] for name, number in found.items()}
        yield {**named, **words, **found}


def names_of(value: Value, accuracy: Accuracy, labels: Labels | None) -> list[str]:
    """Returns a short name for each number, in the order of `rows_of`.

    The name is "" if the number has no labels.
    """
    return [
        ", ".join(str(word) for column, word in row.items() if column not in _NUMBERS)
        for row in rows_of(value, accuracy, labels)
    ]


def frame_of(rows: list[dict[str, Any]]) -> Any:
    """Converts the dicts of `rows_of` to a pandas DataFrame, with their labels as its index."""
    pandas = _checks.extra("pandas", "sweep")
    titles = titles_of(rows)
    # Arrays of a pytree may have different axes, so a row may lack a label that other rows have.
    # Its label is then an empty string. pandas would fill in NaN, and so convert the integer labels
    # of other rows to floats.
    frame = pandas.DataFrame([{title: row.get(title, "") for title in titles} for row in rows])
    places = [title for title in titles if title not in _NUMBERS]
    return frame.set_index(places) if places else frame


def titles_of(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the column titles of all rows: labels first, and then value, low and high."""
    found = dict.fromkeys(title for row in rows for title in row)
    return sorted(found, key=lambda title: title in _NUMBERS)


def html_of(
    titles: Sequence[str], rows: Sequence[Sequence[Any]], above: str, below: str = ""
) -> str:
    """Returns an HTML table of rows with column titles, with one line above and one below it."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = ["".join(f"<td>{_cell(entry)}</td>" for entry in row) for row in rows[:_MOST_ROWS]]
    if (left_out := len(rows) - _MOST_ROWS) > 0:
        lines.append(f'<td colspan="{len(titles)}">and {left_out} more</td>')
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<table><caption>{html.escape(above)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table><p>{html.escape(below)}</p>"
    )


def _cell(entry: Any) -> str:
    return html.escape(f"{entry:.6g}" if isinstance(entry, float) else str(entry))
