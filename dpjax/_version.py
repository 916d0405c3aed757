"""The version: checkpoints carry it, for another one may draw other pairs."""

__version__ = "0.1.0"
