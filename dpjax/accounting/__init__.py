"""Composition of privacy guarantees, and budgets for many releases."""

from dpjax.accounting._adaptive import PrivacyFilter as PrivacyFilter
from dpjax.accounting._adaptive import PrivacyOdometer as PrivacyOdometer
from dpjax.accounting._compose_at import compose_at as compose_at
from dpjax.accounting._compose_events import compose_events as compose_events
from dpjax.accounting._composition import compose as compose
from dpjax.accounting._composition import group as group
from dpjax.accounting._composition import post_process as post_process
from dpjax.accounting._concentrated import zcdp_to_epsilon as zcdp_to_epsilon
from dpjax.accounting._distribution_shift import (
    under_distribution_shift as under_distribution_shift,
)
from dpjax.accounting._dp_sgd import Sampling as Sampling
from dpjax.accounting._dp_sgd import dp_sgd as dp_sgd
from dpjax.accounting._dp_sgd import dp_sgd_noise_multiplier as dp_sgd_noise_multiplier
from dpjax.accounting._ledger import LedgerReport as LedgerReport
from dpjax.accounting._parallel import Part as Part
from dpjax.accounting._parallel import Parts as Parts
from dpjax.accounting._parallel import parallel as parallel
from dpjax.accounting._share import Share as Share
