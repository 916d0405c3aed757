"""Shared parts of all plots: axes, styles for color-blind readers, and labels with units."""

from typing import TYPE_CHECKING, TypedDict

from dpjax._core import _checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import LineStyleType

# Okabe and Ito (2008), "Color Universal Design", without yellow, which is faint on white.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# Curves differ in lines and markers too: print and some readers lose color.
LINES: "tuple[LineStyleType, ...]" = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (8, 3)),
    (0, (1, 3)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Style(TypedDict):
    """The look of a curve."""

    color: str
    linestyle: "LineStyleType"
    marker: str


def axes_or_new(ax: "Axes | None") -> "Axes":
    """The given axes, or those of a new figure."""
    if ax is not None:
        return ax
    return _checks.extra("matplotlib.pyplot", "plot").figure(layout="constrained").subplots()


def style(index: int) -> Style:
    """The look of the curve with this number."""
    place = index % len(COLORS)
    return {"color": COLORS[place], "linestyle": LINES[place], "marker": MARKERS[place]}


def with_unit(label: str, unit: str) -> str:
    """A label of an axis."""
    return f"{label} [{unit}]" if unit else label


def legend_above(ax: "Axes", columns: int = 2) -> None:
    """Draws a legend that covers no data."""
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False)
