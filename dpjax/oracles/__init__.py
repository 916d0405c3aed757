"""Oracles: public models of plausible databases."""

from dpjax.oracles._class_gaussians import class_gaussians as class_gaussians
from dpjax.oracles._from_density import from_density as from_density
from dpjax.oracles._independent import IndependentRecords as IndependentRecords
from dpjax.oracles._independent import independent as independent
from dpjax.oracles._independent import mixture as mixture
from dpjax.oracles._resample import resample as resample
from dpjax.oracles._resample import smoothed_resample as smoothed_resample
from dpjax.oracles._resample import words as words
