"""Inference about the population behind the records of releases, by simulation of public models."""
