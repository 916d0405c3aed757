"""Traced programs: their operations, their fingerprints, and ways to run them."""
