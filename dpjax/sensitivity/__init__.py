"""Sensitivities: sampled, and known from analysis."""
