"""Privacy accounting: composition of guarantees, and budgets for several releases."""

from dpjax._core._losses import Risk
from dpjax.accounting._adaptive import PrivacyFilter, PrivacyOdometer
from dpjax.accounting._compose_at import compose_at, risk
from dpjax.accounting._compose_events import compose_events
from dpjax.accounting._composed_steps import Sampling
from dpjax.accounting._composition import compose, group, post_process
from dpjax.accounting._concentrated import zcdp_to_epsilon
from dpjax.accounting._distribution_shift import under_distribution_shift
from dpjax.accounting._dp_sgd import dp_sgd, dp_sgd_risk
from dpjax.accounting._least_noise import dp_sgd_noise_multiplier
from dpjax.accounting._ledger import LedgerReport
from dpjax.accounting._monte_carlo import SimulatedLosses, monte_carlo
from dpjax.accounting._parallel import Part, Parts, parallel
from dpjax.accounting._repeat_and_select import best_of_runs, dp_sgd_best_of_runs
from dpjax.accounting._share import Share

__all__ = [
    "LedgerReport",
    "Part",
    "Parts",
    "PrivacyFilter",
    "PrivacyOdometer",
    "Risk",
    "Sampling",
    "Share",
    "SimulatedLosses",
    "best_of_runs",
    "compose",
    "compose_at",
    "compose_events",
    "dp_sgd",
    "dp_sgd_best_of_runs",
    "dp_sgd_noise_multiplier",
    "dp_sgd_risk",
    "group",
    "monte_carlo",
    "parallel",
    "post_process",
    "risk",
    "under_distribution_shift",
    "zcdp_to_epsilon",
]
