"""What published results give away: membership, reconstruction, tracing and linkage."""

from dpjax.attacks._all_subsets import most_wrong as most_wrong
from dpjax.attacks._all_subsets import reconstruct_from_all_subsets as reconstruct_from_all_subsets
from dpjax.attacks._all_subsets import subset_counts as subset_counts
from dpjax.attacks._all_subsets import subset_distortions as subset_distortions
from dpjax.attacks._differencing import Differences as Differences
from dpjax.attacks._differencing import differencing as differencing
from dpjax.attacks._guessing_bound import guessing_bound as guessing_bound
from dpjax.attacks._least_squares import (
    reconstruct_by_least_squares as reconstruct_by_least_squares,
)
from dpjax.attacks._linear_program import (
    reconstruct_by_linear_program as reconstruct_by_linear_program,
)
from dpjax.attacks._linkage import Linkage as Linkage
from dpjax.attacks._linkage import anonymity as anonymity
from dpjax.attacks._linkage import linkage as linkage
from dpjax.attacks._noisy_table import reconstruct_from_noisy_table as reconstruct_from_noisy_table
from dpjax.attacks._noisy_table import subset_error as subset_error
from dpjax.attacks._phase_change import expected_recovered_fraction as expected_recovered_fraction
from dpjax.attacks._phase_change import recovered_fraction as recovered_fraction
from dpjax.attacks._synthetic_register import synthetic_register as synthetic_register
from dpjax.attacks._tracing import tracing_scores as tracing_scores
from dpjax.attacks._walsh_hadamard import (
    reconstruct_from_walsh_hadamard as reconstruct_from_walsh_hadamard,
)
from dpjax.attacks._walsh_hadamard import walsh_hadamard as walsh_hadamard
