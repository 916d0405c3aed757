"""Integers and rounding: the exact arithmetic that every bound relies on."""
