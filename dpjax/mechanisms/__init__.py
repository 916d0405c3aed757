"""Mechanisms: keyed noise calibrated to a sensitivity."""

from dpjax.mechanisms._above_threshold import AboveThreshold as AboveThreshold
from dpjax.mechanisms._above_threshold import SparseVectorState as SparseVectorState
from dpjax.mechanisms._additive import AdditiveMechanism as AdditiveMechanism
from dpjax.mechanisms._additive import additive as additive
from dpjax.mechanisms._bernstein import BernsteinMechanism as BernsteinMechanism
from dpjax.mechanisms._oracle_check import OracleCheck as OracleCheck
from dpjax.mechanisms._oracle_check import OraclePlausibility as OraclePlausibility
from dpjax.mechanisms._propose_test_release import ProposeTestRelease as ProposeTestRelease
from dpjax.mechanisms._propose_test_release import Reply as Reply
from dpjax.mechanisms._randomized_response import RandomizedResponse as RandomizedResponse
from dpjax.mechanisms._randomized_response import UnaryEncoding as UnaryEncoding
from dpjax.mechanisms._selection import PosteriorSampler as PosteriorSampler
from dpjax.mechanisms._selection import SelectionMechanism as SelectionMechanism
from dpjax.mechanisms._selection import SelectionRule as SelectionRule
from dpjax.mechanisms._shaped_gaussian import ShapedGaussianMechanism as ShapedGaussianMechanism
from dpjax.mechanisms._smooth_quantile import SmoothQuantile as SmoothQuantile
from dpjax.mechanisms._subset_envelope import Candidate as Candidate
from dpjax.mechanisms._subset_envelope import SubsetEnvelope as SubsetEnvelope
from dpjax.release._mechanism import SensitivityMechanism as SensitivityMechanism
