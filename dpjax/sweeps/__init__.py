"""Functions on grids of settings: computed in chunks, kept on disk, returned with labels."""
