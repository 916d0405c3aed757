"""Sensitivities of targets: estimated from samples of an oracle, or assumed by the user."""
