"""Formulas of the pages, turned into MathML; `mkdocs.yml` names this file.

A page writes formulas in TeX as GitHub reads them: `$...$` in a sentence, a block fenced as `math`
between paragraphs. Browsers draw MathML by themselves: no script, no font, no network.
"""

import re
import typing

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

# Between code (190) and the backslash (180), which would take those of TeX.
_PRIORITY = 185


# Bars must neither grow with their exponents nor stand apart like relations; a slash needs no room.
_TIGHT = re.compile(r"<mo(?: stretchy=\"false\")?>(?=&#x(?:02016|0007C|0002F);)")
# Functions need the space of an operator, but for those in front of a bracket.
_FUNCTION = re.compile(
    r"<m([io])(?: movablelimits=\"true\")?>(cos|det|exp|ln|log|max|min|sin)</m\1>"
    r"(<mo[^>]*>&#x00028;)?"
)


def _mathml(formula: str, display: str = "inline") -> str:
    text = convert(formula, display=display)
    text = _TIGHT.sub('<mo stretchy="false" lspace="0" rspace="0">', text)

    def spaced(match: re.Match[str]) -> str:
        after = 0 if match[3] else 0.17
        return f'<mo lspace="0.17em" rspace="{after}em">{match[2]}</mo>{match[3] or ""}'

    return _FUNCTION.sub(spaced, text)


class _InlineFormula(InlineProcessor):
    def handleMatch(self, m, data):  # noqa: N802
        formula = self.md.htmlStash.store(_mathml(m[1]))
        return formula, m.start(0), m.end(0)


class _Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        pattern = _InlineFormula(r"(?<![\\\w$])\$(?=[^\s$])([^$]+?)(?<=\S)\$(?![\w$])", md)
        md.inlinePatterns.register(pattern, "formula", _PRIORITY)


def _block(source: str, *_: typing.Any, **__: typing.Any) -> str:
    return f'<div class="formula">{_mathml(source, "block")}</div>'


def on_config(config: typing.Any) -> typing.Any:
    """Adds formulas to what the site understands."""
    config.markdown_extensions.append(_Formulas())
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": _block}]
    return config
