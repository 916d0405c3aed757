"""Traced programs: what they do, what they are, and what runs them."""
