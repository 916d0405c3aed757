"""Draws the rooms of dpjax and what they import: docs/images/rooms-light.svg and rooms-dark.svg.

A room stands above all that it imports. An arrow that other arrows imply is left out.
"""

import ast
import functools
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dpjax"
IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, ROW, BOX_HEIGHT, BOX_WIDTH = 960, 84, 44, 150
COLORS = {
    "light": {"text": "#1f2330", "public": "#e3e7fa", "private": "#eceef2", "line": "#8a90a8"},
    "dark": {"text": "#e8eaf2", "public": "#36407a", "private": "#3a3f4c", "line": "#8a90a8"},
}


def imports():
    """The rooms that each room imports."""
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    found = {room: set() for room in rooms}
    for room in rooms:
        for file in (PACKAGE / room).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("dpjax."):
                    found[room].add(node.module.split(".")[1])
    return {room: (others & set(rooms)) - {room} for room, others in found.items()}


def drawn_arrows(graph):
    """The arrows that no longer way implies."""

    @functools.cache
    def below(room):
        return graph[room].union(*map(below, graph[room])) if graph[room] else frozenset()

    for room, others in graph.items():
        implied = set().union(*map(below, others)) if others else set()
        yield from ((room, other) for other in sorted(others - implied))


def places(graph):
    """The middle of each room: a row for each level, ordered so that arrows are short."""

    @functools.cache
    def level(room):
        return 1 + max(map(level, graph[room]), default=-1)

    rows = [[] for _ in range(1 + max(map(level, graph)))]
    for room in sorted(graph):
        rows[level(room)].append(room)
    found = {}
    for depth, row in enumerate(rows):
        arrows = dict.fromkeys(row, ())
        arrows.update({room: [b for a, b in drawn_arrows(graph) if a == room] for room in row})

        def mean_place(room, arrows=arrows):
            across = [found[other][0] for other in arrows[room] if other in found]
            return sum(across) / len(across) if across else WIDTH / 2

        for i, room in enumerate(sorted(row, key=mean_place)):
            across = WIDTH * (i + 0.5) / len(row)
            found[room] = across, (len(rows) - depth - 0.5) * ROW
    return found, ROW * len(rows)


def picture(colors):
    """The drawing as SVG."""
    graph = imports()
    middle, height = places(graph)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="sans-serif" font-size="15" text-anchor="middle">',
        "<title>The rooms of dpjax, each above the rooms that it imports</title>",
    ]
    for room, other in drawn_arrows(graph):
        (x, y), (to_x, to_y) = middle[room], middle[other]
        start, end = y + BOX_HEIGHT / 2, to_y - BOX_HEIGHT / 2
        bend = (end - start) / 2
        lines.append(
            f'<path d="M{x:.0f} {start:.0f} C{x:.0f} {start + bend:.0f} {to_x:.0f}'
            f' {end - bend:.0f} {to_x:.0f} {end:.0f}" fill="none" stroke="{colors["line"]}"/>'
        )
    for room, (x, y) in middle.items():
        fill = colors["private" if room.startswith("_") else "public"]
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        lines += [
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
            f' rx="6" fill="{fill}"/>',
            f'<text x="{x:.0f}" y="{y + 5:.0f}" fill="{colors["text"]}">{escape(room)}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def main():
    """Writes both pictures."""
    IMAGES.mkdir(exist_ok=True)
    for theme, colors in COLORS.items():
        (IMAGES / f"rooms-{theme}.svg").write_text(picture(colors))


if __name__ == "__main__":
    main()
