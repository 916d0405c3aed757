"""dpjax: privatize any JAX function by evaluating it on millions of databases at once."""

from dpjax import accounting as accounting
from dpjax import auditing as auditing
from dpjax import mechanisms as mechanisms
from dpjax import oracles as oracles
from dpjax import plotting as plotting
from dpjax import random as random
from dpjax import targets as targets
from dpjax.base import Guarantee as Guarantee
from dpjax.base import Mechanism as Mechanism
from dpjax.base import NeighboringRelation as NeighboringRelation
from dpjax.base import Norm as Norm
from dpjax.base import OperatingPoint as OperatingPoint
from dpjax.base import Oracle as Oracle
from dpjax.base import Release as Release
from dpjax.base import SampledEvent as SampledEvent
from dpjax.base import Sensitivity as Sensitivity
from dpjax.base import Target as Target
from dpjax.exact_sums import ExactSum as ExactSum
from dpjax.exact_sums import exact_sum as exact_sum
from dpjax.exact_sums import sum_sensitivity as sum_sensitivity
from dpjax.mechanisms._bernstein import bernstein as bernstein
from dpjax.mechanisms._bernstein_polynomial import BernsteinPolynomial as BernsteinPolynomial
from dpjax.mechanisms._bernstein_polynomial import approximate_bernstein as approximate_bernstein
from dpjax.mechanisms._bernstein_polynomial import on_lattice as on_lattice
from dpjax.mechanisms._exponential import exponential as exponential
from dpjax.mechanisms._gaussian import gaussian as gaussian
from dpjax.mechanisms._laplace import laplace as laplace
from dpjax.mechanisms._permute_and_flip import permute_and_flip as permute_and_flip
from dpjax.mechanisms._privatize import privatize as privatize
from dpjax.mechanisms._randomized_response import randomized_response as randomized_response
from dpjax.operating_points import operating_point as operating_point
from dpjax.order_statistics import order_statistic as order_statistic
from dpjax.sensitivity._analytic import analytic_sensitivity as analytic_sensitivity
from dpjax.sensitivity._sampler import sample_sensitivity as sample_sensitivity
from dpjax.sensitivity._samples import sensitivity_samples as sensitivity_samples

__version__ = "0.1.0"
