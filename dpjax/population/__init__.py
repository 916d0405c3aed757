"""What releases say about the population behind the records, by simulation of public models."""
