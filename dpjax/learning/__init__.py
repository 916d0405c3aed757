"""Learning from private records by noise in every step (DP-SGD), or in the objective."""

from dpjax.learning._buffers import buffered_strategy
from dpjax.learning._clipped_in_parts import clipped_in_parts
from dpjax.learning._clipping import ClippedGradients, ClippedSum, clipped_gradients
from dpjax.learning._correlated_noise import (
    CorrelatedNoiseState,
    PrivatizerState,
    correlated_noise,
    with_privatizer,
)
from dpjax.learning._fit import Epoch, fit
from dpjax.learning._gaussian_noise import (
    AdaptiveNoiseState,
    NoiseState,
    adaptive_noise,
    gaussian_noise,
)
from dpjax.learning._guarantee_of_state import guarantee
from dpjax.learning._objective_perturbation import ObjectivePerturbation, objective_perturbation
from dpjax.learning._participation import ParticipationLosses, participation_losses
from dpjax.learning._sampling import (
    Batch,
    BatchSampling,
    balls_in_bins_sampling,
    cyclic_sampling,
    fixed_size_sampling,
    min_separation_sampling,
    poisson_sampling,
)
from dpjax.learning._strategies import (
    Strategy,
    banded_strategy,
    optimized_strategy,
    toeplitz_strategy,
)
from dpjax.learning._tune import Winner, tune
from dpjax.learning._weighted_majority import (
    PrivateWeightedMajority,
    WeightedMajorityRun,
    adversarial_losses,
    private_weighted_majority,
    regret_bound,
    weighted_majority,
)

__all__ = [
    "AdaptiveNoiseState",
    "Batch",
    "BatchSampling",
    "ClippedGradients",
    "ClippedSum",
    "CorrelatedNoiseState",
    "Epoch",
    "NoiseState",
    "ObjectivePerturbation",
    "ParticipationLosses",
    "PrivateWeightedMajority",
    "PrivatizerState",
    "Strategy",
    "WeightedMajorityRun",
    "Winner",
    "adaptive_noise",
    "adversarial_losses",
    "balls_in_bins_sampling",
    "banded_strategy",
    "buffered_strategy",
    "clipped_gradients",
    "clipped_in_parts",
    "correlated_noise",
    "cyclic_sampling",
    "fit",
    "fixed_size_sampling",
    "gaussian_noise",
    "guarantee",
    "min_separation_sampling",
    "objective_perturbation",
    "optimized_strategy",
    "participation_losses",
    "poisson_sampling",
    "private_weighted_majority",
    "regret_bound",
    "toeplitz_strategy",
    "tune",
    "weighted_majority",
    "with_privatizer",
]
