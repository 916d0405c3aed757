"""Mechanisms: randomized functions of a key and a value, calibrated to a sensitivity."""

from dpjax.mechanisms._above_threshold import AboveThreshold, SparseVectorState
from dpjax.mechanisms._additive import AdditiveMechanism, additive, gaussian_for_advantage
from dpjax.mechanisms._bernstein import BernsteinMechanism
from dpjax.mechanisms._oracle_check import OracleCheck, OraclePlausibility
from dpjax.mechanisms._posterior_sampler import PosteriorSampler
from dpjax.mechanisms._propose_test_release import ProposeTestRelease, Reply
from dpjax.mechanisms._randomized_response import RandomizedResponse, UnaryEncoding
from dpjax.mechanisms._selection import SelectionMechanism, SelectionRule
from dpjax.mechanisms._shaped_gaussian import ShapedGaussianMechanism
from dpjax.mechanisms._smooth_quantile import SmoothQuantile
from dpjax.mechanisms._subset_envelope import Candidate, SubsetEnvelope
from dpjax.release._mechanism import SensitivityMechanism

__all__ = [
    "AboveThreshold",
    "AdditiveMechanism",
    "BernsteinMechanism",
    "Candidate",
    "OracleCheck",
    "OraclePlausibility",
    "PosteriorSampler",
    "ProposeTestRelease",
    "RandomizedResponse",
    "Reply",
    "SelectionMechanism",
    "SelectionRule",
    "SensitivityMechanism",
    "ShapedGaussianMechanism",
    "SmoothQuantile",
    "SparseVectorState",
    "SubsetEnvelope",
    "UnaryEncoding",
    "additive",
    "gaussian_for_advantage",
]
