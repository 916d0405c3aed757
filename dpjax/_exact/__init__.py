"""Integers and roundings: exact arithmetic that every bound relies on."""
