"""What all plots share: axes, styles that color-blind readers tell apart, labels with units."""

from typing import Any

from dpjax._core import _checks

# Okabe and Ito (2008), "Color Universal Design", without yellow, which is faint on white.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# Never color alone: it is lost in print and to some readers.
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def axes_or_new(ax: Any) -> Any:
    """The axes to draw on; those of a new figure where none are given."""
    if ax is not None:
        return ax
    return _checks.extra("matplotlib.pyplot", "plot").figure(layout="constrained").subplots()


def style(index: int) -> dict[str, Any]:
    """Color, line and marker of the curve of this number."""
    place = index % len(COLORS)
    return {"color": COLORS[place], "linestyle": LINES[place], "marker": MARKERS[place]}


def with_unit(label: str, unit: str) -> str:
    """A label of an axis."""
    return f"{label} [{unit}]" if unit else label


def legend_above(ax: Any, columns: int = 2) -> None:
    """A legend that covers no data."""
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False)
