"""Mechanisms: keyed noise calibrated to a sensitivity."""

from dpjax.mechanisms._additive import AdditiveMechanism as AdditiveMechanism
from dpjax.mechanisms._additive import additive as additive
from dpjax.mechanisms._bernstein import BernsteinMechanism as BernsteinMechanism
from dpjax.mechanisms._mechanism import SensitivityMechanism as SensitivityMechanism
from dpjax.mechanisms._randomized_response import RandomizedResponse as RandomizedResponse
from dpjax.mechanisms._selection import SelectionMechanism as SelectionMechanism
from dpjax.mechanisms._selection import SelectionRule as SelectionRule
from dpjax.mechanisms._shaped_gaussian import ShapedGaussianMechanism as ShapedGaussianMechanism
from dpjax.mechanisms._unary_encoding import UnaryEncoding as UnaryEncoding
