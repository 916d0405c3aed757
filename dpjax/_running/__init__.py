"""Work on devices and processes: placement, progress, and detection of hangs."""
