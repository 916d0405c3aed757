"""Adds public names to the pages of docs/api/; `mkdocs.yml` names this file.

A page may place names under headings. All others follow, so a new name needs no line of its own.
"""

import re
import typing
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "dpjax"
# The methods of this class are in several files, so its page shows those of its bases, too.
_WITH_BASES = "::: dpjax.PrivateTable\n"
_OPTIONS = "    options:\n      inherited_members: true\n      show_bases: false\n"


def completed(markdown: str, room: str) -> str:
    """The page of a room, with every public name of the room that it does not place itself."""
    folder = _PACKAGE if room == "dpjax" else _PACKAGE / room
    prefix = "dpjax" if room == "dpjax" else f"dpjax.{room}"
    text = (folder / "__init__.py").read_text()
    listed = re.findall(r'"([a-zA-Z]\w*)"', text.partition("__all__ = ")[2])
    names = [name for name in listed if not (folder / name).is_dir()]
    placed = re.findall(rf"^::: {prefix}\.(\w+)$", markdown, flags=re.MULTILINE)
    rest = sorted(set(names) - set(placed), key=str.lower)
    heading = "\n## More names\n" if placed and rest else ""
    shown = markdown + heading + "".join(f"\n::: {prefix}.{name}\n" for name in rest)
    return shown.replace(_WITH_BASES, _WITH_BASES + _OPTIONS)


def on_page_markdown(markdown: str, *, page: typing.Any, **_: typing.Any) -> str:
    """Completes the pages of the reference; mkdocs calls it with every page."""
    folder, _, file = page.file.src_uri.rpartition("/")
    if folder != "api":
        return markdown
    here = re.sub(r"^> On GitHub .*\n", "", markdown, flags=re.MULTILINE)
    return completed(here, file.removesuffix(".md"))
