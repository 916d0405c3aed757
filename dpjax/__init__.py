"""dpjax: privatize any JAX function by evaluating it on millions of databases at once."""

from dpjax import (
    accounting,
    attacks,
    auditing,
    learning,
    mechanisms,
    oracles,
    plotting,
    proving,
    queries,
    random,
    targets,
)
from dpjax._core._guarantee import SampledEvent
from dpjax._core._values import (
    Guarantee,
    Mechanism,
    NeighboringRelation,
    Norm,
    OperatingPoint,
    Oracle,
    Release,
    Sensitivity,
    Target,
)
from dpjax._files._ledger_file import BudgetExceededError, LedgerError
from dpjax._version import __version__
from dpjax.accounting._ledger import Ledger
from dpjax.auditing._gamma_by_record import RecordGammas, gamma_by_record
from dpjax.auditing._privacy_profile import PrivacyProfile, privacy_profile
from dpjax.auditing._sensitivity_report import SensitivityReport, sensitivity_report
from dpjax.mechanisms._above_threshold import above_threshold
from dpjax.mechanisms._additive import discrete_laplace, gaussian, laplace
from dpjax.mechanisms._bernstein import (
    BernsteinPolynomial,
    approximate_bernstein,
    bernstein,
    evaluate_on_lattice,
)
from dpjax.mechanisms._oracle_check import check_oracle
from dpjax.mechanisms._posterior_sampler import posterior_sampler
from dpjax.mechanisms._propose_test_release import propose_test_release
from dpjax.mechanisms._randomized_response import randomized_response, two_coins, unary_encoding
from dpjax.mechanisms._selection import exponential, permute_and_flip
from dpjax.mechanisms._shaped_gaussian import shaped_gaussian
from dpjax.mechanisms._smooth_quantile import smooth_quantile
from dpjax.mechanisms._subset_envelope import subset_envelope
from dpjax.population._bank import SimulationBank, posterior, simulation_bank
from dpjax.population._confidence_set import ConfidenceSet, confidence_set
from dpjax.population._posterior import Posterior
from dpjax.population._widths import posterior_widths
from dpjax.proving._prove_sensitivity import prove_sensitivity
from dpjax.release._privatize import privatize
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.sensitivity._noise_shape import noise_shape
from dpjax.sensitivity._operating_points import operating_point
from dpjax.sensitivity._order_statistics import order_statistic
from dpjax.sensitivity._record_bound import record_bound
from dpjax.sensitivity._sample_sensitivity import sample_distances, sample_sensitivity
from dpjax.sensitivity._shaped_norm import NoiseShape
from dpjax.sweeps._axes import cell_key
from dpjax.sweeps._rehearse import rehearse
from dpjax.sweeps._sensitivity_grid import sensitivity_grid
from dpjax.sweeps._sweep import sweep
from dpjax.tables._private_table import PrivateTable

__all__ = [
    "BernsteinPolynomial",
    "BudgetExceededError",
    "ConfidenceSet",
    "Guarantee",
    "Ledger",
    "LedgerError",
    "Mechanism",
    "NeighboringRelation",
    "NoiseShape",
    "Norm",
    "OperatingPoint",
    "Oracle",
    "Posterior",
    "PrivacyProfile",
    "PrivateTable",
    "RecordGammas",
    "Release",
    "SampledEvent",
    "Sensitivity",
    "SensitivityReport",
    "SimulationBank",
    "Target",
    "__version__",
    "above_threshold",
    "accounting",
    "approximate_bernstein",
    "assume_sensitivity",
    "attacks",
    "auditing",
    "bernstein",
    "cell_key",
    "check_oracle",
    "confidence_set",
    "discrete_laplace",
    "evaluate_on_lattice",
    "exponential",
    "gamma_by_record",
    "gaussian",
    "laplace",
    "learning",
    "mechanisms",
    "noise_shape",
    "operating_point",
    "oracles",
    "order_statistic",
    "permute_and_flip",
    "plotting",
    "posterior",
    "posterior_sampler",
    "posterior_widths",
    "privacy_profile",
    "privatize",
    "propose_test_release",
    "prove_sensitivity",
    "proving",
    "queries",
    "random",
    "randomized_response",
    "record_bound",
    "rehearse",
    "sample_distances",
    "sample_sensitivity",
    "sensitivity_grid",
    "sensitivity_report",
    "shaped_gaussian",
    "simulation_bank",
    "smooth_quantile",
    "subset_envelope",
    "sweep",
    "targets",
    "two_coins",
    "unary_encoding",
]
