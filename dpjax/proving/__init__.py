"""Proofs of sensitivity, from traced programs: bounds for them, and what they refuse."""

from dpjax._core._record_bounds import Ball as Ball
from dpjax._core._record_bounds import Categories as Categories
from dpjax.proving._proof import NoProofError as NoProofError
