"""Sensitivities: sampled from an oracle, or assumed by the user."""
