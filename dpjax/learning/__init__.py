"""Learning from private records by noise in every step (DP-SGD), or in the objective."""

from dpjax.learning._clipped_in_parts import clipped_in_parts as clipped_in_parts
from dpjax.learning._clipping import ClippedGradients as ClippedGradients
from dpjax.learning._clipping import ClippedSum as ClippedSum
from dpjax.learning._clipping import clipped_gradients as clipped_gradients
from dpjax.learning._fit import fit as fit
from dpjax.learning._gaussian_noise import AdaptiveNoiseState as AdaptiveNoiseState
from dpjax.learning._gaussian_noise import NoiseState as NoiseState
from dpjax.learning._gaussian_noise import adaptive_noise as adaptive_noise
from dpjax.learning._gaussian_noise import gaussian_noise as gaussian_noise
from dpjax.learning._gaussian_noise import guarantee as guarantee
from dpjax.learning._objective_perturbation import ObjectivePerturbation as ObjectivePerturbation
from dpjax.learning._objective_perturbation import objective_perturbation as objective_perturbation
from dpjax.learning._privatizers import PrivatizerState as PrivatizerState
from dpjax.learning._privatizers import with_privatizer as with_privatizer
from dpjax.learning._sampling import Batch as Batch
from dpjax.learning._sampling import BatchSampling as BatchSampling
from dpjax.learning._sampling import fixed_size_sampling as fixed_size_sampling
from dpjax.learning._sampling import poisson_sampling as poisson_sampling
from dpjax.learning._weighted_majority import (
    PrivateWeightedMajority as PrivateWeightedMajority,
)
from dpjax.learning._weighted_majority import WeightedMajorityRun as WeightedMajorityRun
from dpjax.learning._weighted_majority import adversarial_losses as adversarial_losses
from dpjax.learning._weighted_majority import (
    private_weighted_majority as private_weighted_majority,
)
from dpjax.learning._weighted_majority import regret_bound as regret_bound
from dpjax.learning._weighted_majority import weighted_majority as weighted_majority
