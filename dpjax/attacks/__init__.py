"""Attacks on published results: membership, reconstruction, tracing and linkage."""

from dpjax.attacks._linear_queries import Differences as Differences
from dpjax.attacks._linear_queries import differencing as differencing
from dpjax.attacks._linear_queries import (
    reconstruct_by_least_squares as reconstruct_by_least_squares,
)
from dpjax.attacks._linear_queries import (
    reconstruct_by_linear_program as reconstruct_by_linear_program,
)
from dpjax.attacks._linkage import Linkage as Linkage
from dpjax.attacks._linkage import anonymity as anonymity
from dpjax.attacks._linkage import linkage as linkage
from dpjax.attacks._linkage import synthetic_register as synthetic_register
from dpjax.attacks._membership_trials import likelihood_ratio as likelihood_ratio
from dpjax.attacks._membership_trials import membership_trials as membership_trials
from dpjax.attacks._roc_curve import ClaimComparison as ClaimComparison
from dpjax.attacks._roc_curve import RocCurve as RocCurve
from dpjax.attacks._roc_curve import TruePositiveRate as TruePositiveRate
from dpjax.attacks._roc_curve import compare_with_claim as compare_with_claim
from dpjax.attacks._roc_curve import guessing_bound as guessing_bound
from dpjax.attacks._roc_curve import highest_true_positive_rate as highest_true_positive_rate
from dpjax.attacks._roc_curve import roc_curve as roc_curve
from dpjax.attacks._shadow_models import ShadowModels as ShadowModels
from dpjax.attacks._shadow_models import lira as lira
from dpjax.attacks._shadow_models import logit_confidence as logit_confidence
from dpjax.attacks._shadow_models import rmia as rmia
from dpjax.attacks._shadow_models import shadow_models as shadow_models
from dpjax.attacks._subset_sums import max_wrong_guesses as max_wrong_guesses
from dpjax.attacks._subset_sums import reconstruct_from_all_subsets as reconstruct_from_all_subsets
from dpjax.attacks._subset_sums import reconstruct_from_noisy_table as reconstruct_from_noisy_table
from dpjax.attacks._subset_sums import subset_counts as subset_counts
from dpjax.attacks._subset_sums import subset_distortions as subset_distortions
from dpjax.attacks._subset_sums import subset_error as subset_error
from dpjax.attacks._tracing import tracing_scores as tracing_scores
from dpjax.attacks._walsh_hadamard import expected_recovered_fraction as expected_recovered_fraction
from dpjax.attacks._walsh_hadamard import (
    reconstruct_from_walsh_hadamard as reconstruct_from_walsh_hadamard,
)
from dpjax.attacks._walsh_hadamard import recovered_fraction as recovered_fraction
from dpjax.attacks._walsh_hadamard import walsh_hadamard as walsh_hadamard
