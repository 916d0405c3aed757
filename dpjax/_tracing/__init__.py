"""Traced programs (jaxprs): checks of their operations, fingerprints, and ways to run them."""
