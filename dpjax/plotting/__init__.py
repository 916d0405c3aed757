"""Plots of results; drawing a plot imports matplotlib."""

from dpjax.plotting._audit_curve import audit_curve as audit_curve
from dpjax.plotting._gamma_by_record import gamma_by_record as gamma_by_record
from dpjax.plotting._ledger_history import ledger_history as ledger_history
from dpjax.plotting._noise import noise as noise
from dpjax.plotting._operating_points import least_pairs as least_pairs
from dpjax.plotting._operating_points import overestimate as overestimate
from dpjax.plotting._privacy_profile import privacy_profile as privacy_profile
from dpjax.plotting._recovered_fraction import recovered_fraction as recovered_fraction
from dpjax.plotting._regret_bounds import regret_bounds as regret_bounds
from dpjax.plotting._rehearsal import rehearsal as rehearsal
from dpjax.plotting._release_with_error import release_with_error as release_with_error
from dpjax.plotting._released_function import released_function as released_function
from dpjax.plotting._roc_curve import roc_curve as roc_curve
from dpjax.plotting._sensitivity_ecdf import sensitivity_ecdf as sensitivity_ecdf
from dpjax.plotting._utility import utility as utility
