"""Shows the gallery as cards, each with the first picture of its notebook; `mkdocs.yml` names this.

On GitHub the page stays a list.
"""

import base64
import json
import re
import typing
from pathlib import Path

from mkdocs.structure.files import File

_ITEM = r"- \[(.+?)\]\(notebooks/([\w-]+)\.ipynb\): ((?:.+\n)(?:  .+\n)*)"
_LIST = re.compile(rf"(?:^{_ITEM})+", re.MULTILINE)
_CARD = (
    "- [![First picture of the notebook]({picture})](notebooks/{stem}.ipynb)\n\n"
    "    **[{title}](notebooks/{stem}.ipynb)**\n\n    {text}\n\n"
)


def first_picture(notebook: Path) -> bytes:
    """The first picture that a notebook shows, in PNG."""
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", []):
            if (png := output.get("data", {}).get("image/png")) is not None:
                return base64.b64decode(png)
    raise ValueError(f"{notebook} shows no picture: execute it by `make notebooks`")


def as_cards(markdown: str) -> str:
    """Every list of notebooks becomes a grid of cards."""

    def card(match: re.Match[str]) -> str:
        title, stem, text = match.groups()
        text = " ".join(text.split())
        return _CARD.format(picture=_picture(stem), stem=stem, title=title, text=text)

    def grid(match: re.Match[str]) -> str:
        cards = re.sub(_ITEM, card, match[0])
        return f'<div class="grid cards gallery" markdown>\n\n{cards}\n</div>\n'

    return _LIST.sub(grid, markdown)


def _picture(stem: str) -> str:
    return f"images/notebook-{stem}.png"


def on_files(files: typing.Any, config: typing.Any) -> typing.Any:
    """Adds the pictures to the site."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            path = Path(file.abs_src_path)
            files.append(File.generated(config, _picture(path.stem), content=first_picture(path)))
    return files


def on_page_markdown(markdown: str, *, page: typing.Any, **_: typing.Any) -> str:
    """Changes the gallery alone."""
    return as_cards(markdown) if page.file.src_uri == "gallery.md" else markdown
