"""Work on devices and processes: where it runs, how far it is, and whether it ends."""
