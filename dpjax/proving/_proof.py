"""The error where there is no proof."""


class NoProofError(ValueError):
    """A target has no proof.

    Attributes:
        args: the operation that has no rule, its line, and a remedy.

    Formal guarantees:
        None: it says that no bound was found, not that there is none. It depends on the traced
        program, shapes and bounds alone, never on private data.
    """
