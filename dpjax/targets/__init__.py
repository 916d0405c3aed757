"""Targets worth having: pure JAX functions of a database, with bounds where they are known."""

from dpjax.targets._kernel_regression import nadaraya_watson as nadaraya_watson
from dpjax.targets._kernel_regression import nadaraya_watson_bound as nadaraya_watson_bound
from dpjax.targets._kernel_regression import priestley_chao as priestley_chao
from dpjax.targets._logistic_regression import logistic_regression as logistic_regression
from dpjax.targets._logistic_regression import (
    logistic_regression_bound as logistic_regression_bound,
)
from dpjax.targets._summable import Summable as Summable
from dpjax.targets._summable import summable as summable
