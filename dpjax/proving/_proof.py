"""The record of a proof, and the error where there is none."""


class NoProofError(ValueError):
    """A target has no proof: names the operation, its line, and a remedy."""
