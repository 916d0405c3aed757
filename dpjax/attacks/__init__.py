"""Attacks on published results: membership, reconstruction, tracing and linkage."""

from dpjax.attacks._linear_queries import (
    Differences,
    differencing,
    expected_recovered_fraction,
    reconstruct_by_least_squares,
    reconstruct_by_linear_program,
    reconstruct_from_walsh_hadamard,
    recovered_fraction,
    walsh_hadamard,
)
from dpjax.attacks._linkage import Linkage, anonymity, linkage, synthetic_register
from dpjax.attacks._membership_trials import likelihood_ratio, membership_trials, tracing_scores
from dpjax.attacks._roc_curve import (
    ClaimComparison,
    RocCurve,
    TruePositiveRate,
    compare_with_claim,
    guessing_bound,
    highest_true_positive_rate,
    roc_curve,
)
from dpjax.attacks._shadow_models import ShadowModels, lira, logit_confidence, rmia, shadow_models
from dpjax.attacks._subset_sums import (
    max_wrong_guesses,
    reconstruct_from_all_subsets,
    reconstruct_from_noisy_table,
    subset_counts,
    subset_distortions,
    subset_error,
)

__all__ = [
    "ClaimComparison",
    "Differences",
    "Linkage",
    "RocCurve",
    "ShadowModels",
    "TruePositiveRate",
    "anonymity",
    "compare_with_claim",
    "differencing",
    "expected_recovered_fraction",
    "guessing_bound",
    "highest_true_positive_rate",
    "likelihood_ratio",
    "linkage",
    "lira",
    "logit_confidence",
    "max_wrong_guesses",
    "membership_trials",
    "reconstruct_by_least_squares",
    "reconstruct_by_linear_program",
    "reconstruct_from_all_subsets",
    "reconstruct_from_noisy_table",
    "reconstruct_from_walsh_hadamard",
    "recovered_fraction",
    "rmia",
    "roc_curve",
    "shadow_models",
    "subset_counts",
    "subset_distortions",
    "subset_error",
    "synthetic_register",
    "tracing_scores",
    "walsh_hadamard",
]
