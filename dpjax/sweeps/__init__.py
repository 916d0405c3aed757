"""Grids of settings: computed in chunks, kept on disk, returned as labeled arrays."""
