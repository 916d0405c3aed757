"""Plots of results; drawing a plot imports matplotlib."""

from dpjax.plotting._population import confidence_set, posterior
from dpjax.plotting._privacy import (
    audit_curve,
    gamma_by_record,
    ledger_history,
    privacy_profile,
    recovered_fraction,
    roc_curve,
    tradeoff,
)
from dpjax.plotting._releases import noise, release_with_error, released_function
from dpjax.plotting._sensitivity import least_pairs, overestimate, sensitivity_ecdf
from dpjax.plotting._utility import regret_bounds, rehearsal, utility

__all__ = [
    "audit_curve",
    "confidence_set",
    "gamma_by_record",
    "least_pairs",
    "ledger_history",
    "noise",
    "overestimate",
    "posterior",
    "privacy_profile",
    "recovered_fraction",
    "regret_bounds",
    "rehearsal",
    "release_with_error",
    "released_function",
    "roc_curve",
    "sensitivity_ecdf",
    "tradeoff",
    "utility",
]
