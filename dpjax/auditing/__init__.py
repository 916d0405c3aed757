"""Checks that a mechanism keeps its promise."""
