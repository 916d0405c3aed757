"""Proofs of sensitivity, from traced programs."""

from dpjax._core._record_bounds import Ball as Ball
from dpjax._core._record_bounds import Categories as Categories
from dpjax.proving._entry import global_sensitivity as global_sensitivity
from dpjax.proving._proof import NoProofError as NoProofError
