"""Useful targets: pure JAX functions of a database, most of them with a known sensitivity."""

from dpjax.sensitivity._sums import Summable as Summable
from dpjax.targets._command_line import command_line as command_line
from dpjax.targets._host import host as host
from dpjax.targets._kernels import kernel_density as kernel_density
from dpjax.targets._kernels import kernel_density_on_lattice as kernel_density_on_lattice
from dpjax.targets._kernels import nadaraya_watson as nadaraya_watson
from dpjax.targets._kernels import priestley_chao as priestley_chao
from dpjax.targets._known_sensitivity import KnownSensitivity as KnownSensitivity
from dpjax.targets._letter_counts import encode_text as encode_text
from dpjax.targets._letter_counts import letter_counts as letter_counts
from dpjax.targets._linear_svm import linear_svm as linear_svm
from dpjax.targets._optax_training import optax_minibatch_training as optax_minibatch_training
from dpjax.targets._optax_training import optax_training as optax_training
from dpjax.targets._regression import logistic_regression as logistic_regression
from dpjax.targets._regression import ridge_regression as ridge_regression
from dpjax.targets._summable import log_likelihoods as log_likelihoods
from dpjax.targets._summable import summable as summable
from dpjax.targets._summaries import bounded_mean as bounded_mean
from dpjax.targets._summaries import moments as moments
from dpjax.targets._summaries import quantile as quantile
