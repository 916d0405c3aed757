"""Oracles: public models of plausible databases."""

from dpjax.oracles._class_gaussians import class_gaussians
from dpjax.oracles._from_density import from_density
from dpjax.oracles._independent import IndependentRecords, independent, mixture
from dpjax.oracles._resample import resample, smoothed_resample, words

__all__ = [
    "IndependentRecords",
    "class_gaussians",
    "from_density",
    "independent",
    "mixture",
    "resample",
    "smoothed_resample",
    "words",
]
