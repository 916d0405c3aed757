"""Formulas of the pages, turned into MathML; `mkdocs.yml` names this file.

A page writes formulas in TeX as GitHub reads them: `$...$` in a sentence, a block fenced as `math`
between paragraphs. Browsers draw MathML by themselves: no script, no font, no network.
"""

import typing

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

# Code has priority 190 and the backslash 180: formulas come between, for TeX is full of backslashes.
_PRIORITY = 185


class _InlineFormula(InlineProcessor):
    def handleMatch(self, m, data):  # noqa: N802
        formula = self.md.htmlStash.store(convert(m[1]))
        return formula, m.start(0), m.end(0)


class _Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        pattern = _InlineFormula(r"(?<![\\\w$])\$(?=[^\s$])([^$]+?)(?<=\S)\$(?![\w$])", md)
        md.inlinePatterns.register(pattern, "formula", _PRIORITY)


def _block(source: str, *_: typing.Any, **__: typing.Any) -> str:
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: typing.Any) -> typing.Any:
    """Adds formulas to what the site understands."""
    config.markdown_extensions.append(_Formulas())
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": _block}]
    return config
