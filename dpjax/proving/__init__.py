"""Proofs of sensitivity, from traced programs: bounds for them, and what they refuse."""

from dpjax._core._proof import Ball as Ball
from dpjax._core._proof import Categories as Categories
from dpjax.proving._proof import NoProofError as NoProofError
