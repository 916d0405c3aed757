"""Shared code of all plots: axes, styles for color-blind readers, and labels with units."""

import textwrap
from typing import TYPE_CHECKING, Any, TypedDict

from dpjax._core import _checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import LineStyleType

# Colors of Okabe and Ito (2008), "Color Universal Design", without yellow, which is hardly visible
# on white.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# Curves also differ in line styles and markers, for readers who cannot see colors and for prints
# without color.
LINES: "tuple[LineStyleType, ...]" = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (8, 3)),
    (0, (1, 3)),
)
# Widths in a legend, as multiples of the font size: the width of a letter, and of a sample line
# with margins.
_CHARACTER, _HANDLE = 0.56, 4
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Style(TypedDict):
    """The color, line style and marker of a curve, as keyword arguments of matplotlib."""

    color: str
    linestyle: "LineStyleType"
    marker: str


def axes_or_new(ax: "Axes | None") -> "Axes":
    """Returns the given axes, or the axes of a new figure."""
    if ax is not None:
        return ax
    return _checks.extra("matplotlib.pyplot", "plot").figure(layout="constrained").subplots()


def ink() -> str:
    """Returns the color of text: black, or a light color in a dark style sheet."""
    return _checks.extra("matplotlib", "plot").rcParams["text.color"]


def style(index: int) -> Style:
    """Returns the style of the curve with this index."""
    place = index % len(COLORS)
    color = ink() if COLORS[place] == BLACK else COLORS[place]
    return {"color": color, "linestyle": LINES[place], "marker": MARKERS[place]}


def with_unit(label: str, unit: str) -> str:
    """Returns the label of an axis, with its unit in brackets."""
    return f"{label} [{unit}]" if unit else label


def legend_above(ax: "Axes", columns: int = 2, title: str = "") -> "Axes":
    """Draws a legend above the axes and their title, as wide as the axes, so it covers no data."""
    points = 72 / ax.figure.dpi
    width, height = (points * x for x in ax.get_window_extent().size)
    above = 1 + (2 * _points("axes.titlesize") / height if ax.get_title() else 0)
    handles, labels = ax.get_legend_handles_labels()
    look = legend_within(width, labels, columns, title)
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, above), **look)
    return ax


def legend_within(width: float, labels: list[str], columns: int, title: str) -> dict[str, Any]:
    """Returns arguments of a legend no wider than `width` points; long labels are wrapped."""
    size = _points("legend.fontsize")
    most = max(8, int(width / size / _CHARACTER))
    beside_curve = max(8, int((width / size - _HANDLE) / _CHARACTER))
    each = _HANDLE + _CHARACTER * max(map(len, labels), default=1)
    return {
        "labels": [textwrap.fill(label, beside_curve) for label in labels],
        "ncols": max(1, min(columns, int(width / size / each))),
        "title": textwrap.fill(title, most),
        "frameon": False,
    }


def _points(name: str) -> float:
    """Returns a font size of matplotlib's settings in points. The setting may be "large", etc."""
    matplotlib = _checks.extra("matplotlib.font_manager", "plot")
    size = _checks.extra("matplotlib", "plot").rcParams[name]
    return matplotlib.FontProperties(size=size).get_size_in_points()
