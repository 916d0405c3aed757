"""The four jobs of the demo, and the three steps of dpjax that run each of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp

import dpjax
from demo_data import SCIENTISTS, Patients, UnitScale, census_oracle, encode_names, standard_scale
from dpjax import targets

PAIRS = 1000
GAMMA = 0.05
EPSILON = 1.0

# Justified by draws from the oracles alone: a target that is chosen by looking at the private
# records is not covered by the guarantee.
REGULARIZATION = 0.03
BANDWIDTH, RIDGE = 0.15, 0.01
DEGREE, ORDER = 4, 2


def show_vector(vector: jax.Array) -> str:
    """The first entries and the number of them."""
    return f"{vector[0]:.2f} {vector[1]:.2f} ... ({len(vector)})"


@dataclass(frozen=True)
class Job:
    """What to release, and how.

    Attributes:
        name: for the table.
        target: the function of the private database.
        oracle: the public model of databases.
        database: the private records.
        norm: of the mechanism.
        mechanism: makes it from the sampled sensitivity.
        bound: the global sensitivity, where analysis knows it.
        show_value: text for a value of the target.
        show_release: text for a released value.
        show_error: format of the error bar.
    """

    name: str
    target: dpjax.Target
    oracle: dpjax.Oracle
    database: Any
    norm: dpjax.Norm
    mechanism: Callable[[dpjax.Sensitivity], dpjax.Mechanism]
    bound: float | None
    show_value: Callable[[Any], str] = show_vector
    show_release: Callable[[Any], str] = show_vector
    show_error: str = "±{:.2g}"


@dataclass(frozen=True)
class Result:
    """What came of a job; the true value is kept for comparison only and is not private."""

    job: Job
    mechanism: dpjax.Mechanism
    release: dpjax.Release
    profile: dpjax.PrivacyProfile
    true_value: jax.Array
    seconds: float

    @property
    def error(self) -> float:
        """What 95% of releases are within, in all coordinates at once; of selections, a gap."""
        selects = hasattr(self.mechanism, "score_gap")
        bound = self.mechanism.score_gap if selects else self.mechanism.error
        return float(bound(confidence=0.95, shape=self.true_value.shape, simultaneous=True))


def run(key: jax.Array, job: Job) -> Result:
    """Samples the sensitivity of the target, calibrates the mechanism, and releases."""
    key_sample, key_release, key_profile = jax.random.split(key, 3)
    start, n = time.perf_counter(), len(jax.tree.leaves(job.database)[0])
    sensitivity = dpjax.sample_sensitivity(
        key_sample,
        job.target,
        job.oracle,
        n=n,
        norm=job.norm,
        m=PAIRS,
        gamma=GAMMA,
        progress=True,
    )
    mechanism = job.mechanism(sensitivity)
    release = dpjax.privatize(job.target, mechanism)(key_release, job.database)
    jax.block_until_ready(release)
    seconds = time.perf_counter() - start
    profile = dpjax.privacy_profile(key_profile, (job.target, mechanism), job.oracle, n=n, m=PAIRS)
    return Result(job, mechanism, release, profile, job.target(job.database), seconds)


def mean_job(public: Patients, private: Patients) -> Job:
    """(a) The mean of the features, Laplace."""
    scale = UnitScale.of(public.features)
    n, features = private.features.shape
    return Job(
        name="mean of features",
        target=lambda records: jnp.mean(scale(records), axis=0),
        oracle=dpjax.oracles.smoothed_resample(public.features),
        database=private.features,
        norm="l1",
        mechanism=partial(dpjax.laplace, epsilon=EPSILON),
        bound=features / n,
    )


def weights_job(public: Patients, private: Patients) -> Job:
    """(b) The weights of a logistic regression of the diagnosis, Gaussian."""
    scale = standard_scale(public.features)
    n, features = private.features.shape
    fit = targets.logistic_regression(regularization=REGULARIZATION, dims=features)
    return Job(
        name="logistic weights",
        target=lambda records: fit({"x": scale(records["x"]), "y": records["benign"]}),
        oracle=dpjax.oracles.smoothed_resample({"x": public.features, "benign": public.benign}),
        database={"x": private.features, "benign": private.benign},
        norm="l2",
        mechanism=partial(dpjax.gaussian, epsilon=EPSILON, delta=1e-5),
        bound=fit.sensitivity("l2", n=n).value,
    )


def accuracy(weights: jax.Array, public: Patients) -> float:
    """The share of the public patients whose diagnosis the weights predict."""
    predicted = standard_scale(public.features)(public.features) @ weights > 0
    return float(jnp.mean(predicted == public.benign))


def letter_job() -> Job:
    """(c) The most frequent letter in ten names, exponential."""

    def count_letters(people: jax.Array) -> jax.Array:
        letters = jax.nn.one_hot(people, len(ascii_lowercase), dtype=int)  # 0 for the padding
        return jnp.sum(letters, axis=(0, 1))

    def show_most_frequent(counts: jax.Array) -> str:
        return " and ".join(ascii_lowercase[i] for i in jnp.flatnonzero(counts == counts.max()))

    return Job(
        name="most common letter",
        target=count_letters,
        oracle=census_oracle(),
        database=encode_names(SCIENTISTS),
        norm="linf",
        mechanism=partial(dpjax.exponential, epsilon=EPSILON),
        bound=None,  # A name may have any length.
        show_value=show_most_frequent,
        show_release=lambda index: ascii_lowercase[index],
        show_error="gap {:.2g}",
    )


def curve_job(public: jax.Array, private: jax.Array) -> Job:
    """(d) The kernel regression of the second column on the first, Bernstein."""
    lattice = jnp.linspace(0, 1, DEGREE + 1)[:, None]
    return Job(
        name="kernel regression",
        target=dpjax.evaluate_on_lattice(curve_target(public), degree=DEGREE, dims=1),
        oracle=dpjax.oracles.smoothed_resample(public),
        database=private,
        norm="linf",
        mechanism=partial(dpjax.bernstein, epsilon=EPSILON, degree=DEGREE, dims=1, order=ORDER),
        bound=regression().sensitivity("linf", n=len(private)).value,
        show_release=lambda polynomial: show_vector(polynomial(lattice)),
    )


def regression() -> targets.KnownSensitivity:
    """The second column on the first."""
    return targets.nadaraya_watson(bandwidth=BANDWIDTH, regularization=RIDGE)


def curve_target(public: jax.Array) -> dpjax.Target:
    """Kernel regression on [0, 1]: a target that returns a function."""
    scale = curve_scale(public)
    regress = regression()

    def target(records: jax.Array) -> Callable[[jax.Array], jax.Array]:
        x, y = scale(records).T
        return regress({"x": x, "y": y})

    return target


def curve_scale(public: jax.Array) -> UnitScale:
    """The middle 95% of the public range: among the outliers the curve would follow few records."""
    return UnitScale.of(public, share=0.95)
