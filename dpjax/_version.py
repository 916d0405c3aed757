"""The version: checkpoints carry it, for another one may draw other pairs."""

__version__ = "1.0.0"
