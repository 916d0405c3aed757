"""Queries of a database whose sensitivity is known: counts, sums, quantiles, the largest."""
