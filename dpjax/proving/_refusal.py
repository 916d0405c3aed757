"""A program that has no proof."""


class RefusalError(Exception):
    """What keeps an operation from having a rule; the walk adds where it stands."""


class OverflowRefusalError(RefusalError):
    """A compiler may form a number that overflows, so no lemma helps."""
