"""Plots of results; drawing a plot imports matplotlib."""

from dpjax.plotting._attacks import recovered_fraction as recovered_fraction
from dpjax.plotting._attacks import roc_curve as roc_curve
from dpjax.plotting._privacy import audit_curve as audit_curve
from dpjax.plotting._privacy import gamma_by_record as gamma_by_record
from dpjax.plotting._privacy import ledger_history as ledger_history
from dpjax.plotting._privacy import privacy_profile as privacy_profile
from dpjax.plotting._releases import noise as noise
from dpjax.plotting._releases import release_with_error as release_with_error
from dpjax.plotting._releases import released_function as released_function
from dpjax.plotting._sensitivity import least_pairs as least_pairs
from dpjax.plotting._sensitivity import overestimate as overestimate
from dpjax.plotting._sensitivity import sensitivity_ecdf as sensitivity_ecdf
from dpjax.plotting._utility import regret_bounds as regret_bounds
from dpjax.plotting._utility import rehearsal as rehearsal
from dpjax.plotting._utility import utility as utility
