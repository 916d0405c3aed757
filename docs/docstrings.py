"""How the reference reads docstrings; `mkdocs.yml` names it."""

import typing

import griffe


class Examples(griffe.Extension):
    """The section "Example" of this project is what the parser knows as "Examples"."""

    def on_object(self, *, obj: griffe.Object, **kwargs: typing.Any) -> None:
        """Renames the section."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
