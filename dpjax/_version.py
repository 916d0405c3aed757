"""The version. Checkpoints carry it, because another version may draw other pairs."""

__version__ = "1.0.0"
