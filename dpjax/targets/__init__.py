"""Ready-made targets: functions of a database, most of them with a known sensitivity."""

from dpjax.sensitivity._sums import Summable
from dpjax.targets._command_line import command_line
from dpjax.targets._host import host
from dpjax.targets._kernels import (
    kernel_density,
    kernel_density_on_lattice,
    nadaraya_watson,
    priestley_chao,
)
from dpjax.targets._known_sensitivity import KnownSensitivity
from dpjax.targets._linear_svm import linear_svm
from dpjax.targets._optax_training import optax_minibatch_training, optax_training
from dpjax.targets._regression import logistic_regression, ridge_regression
from dpjax.targets._summable import exact_sums, log_likelihoods, summable
from dpjax.targets._summaries import bounded_mean, encode_text, letter_counts, moments, quantile

__all__ = [
    "KnownSensitivity",
    "Summable",
    "bounded_mean",
    "command_line",
    "encode_text",
    "exact_sums",
    "host",
    "kernel_density",
    "kernel_density_on_lattice",
    "letter_counts",
    "linear_svm",
    "log_likelihoods",
    "logistic_regression",
    "moments",
    "nadaraya_watson",
    "optax_minibatch_training",
    "optax_training",
    "priestley_chao",
    "quantile",
    "ridge_regression",
    "summable",
]
