"""Proofs of sensitivity from traced programs: bounds on records, and the error without a proof."""

from dpjax._core._bounds import Ball, Categories, Interval
from dpjax.proving._prove_sensitivity import NoProofError

__all__ = ["Ball", "Categories", "Interval", "NoProofError"]
