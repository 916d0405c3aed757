"""The guarantee of the best of a random number of runs (Papernot and Steinke 2022).

docs/proofs/tuning.md has the proofs. There are two bounds, and the smaller one is used. The first
bound uses the epsilon of one run, and bounds the ratio of probabilities. The second uses the Renyi
divergences of one run, and bounds the Renyi divergences of the best run.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD, check_privacy_unit
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composed_steps import (
    ORDERS,
    NoEpsilonError,
    composed_divergences,
    epsilon_by_renyi,
)
from dpjax.accounting._composition import compose
from dpjax.accounting._dp_sgd import DpSgdRun, Sampling, real_epsilon
from dpjax.random._repetitions import Repetitions, repetitions

_OUTWARD = 1 + 1e-9
# `_by_divergences` assumes a limit on the number of runs. The probability that the number exceeds
# the limit is at most this fraction of delta.
_RARE = 1e-6


class OneRun(NamedTuple):
    """The known privacy costs of one run.

    Attributes:
        guarantee: the guarantee of the run.
        training: the parameters of the run and its noise multiplier, if the run is DP-SGD;
            otherwise None.
        score_epsilon: the epsilon of a score that the run also releases.
    """

    guarantee: Guarantee
    training: tuple[DpSgdRun, float] | None = None
    score_epsilon: float = 0.0


def best_of_runs(one_run: Guarantee, *, runs: float, shape: float = 1.0) -> Guarantee:
    """The guarantee of the best of a random number of runs, from the guarantee of one run.

    The number of runs K is random, and only the best run is shown. By the theorems cited below,
    epsilon is multiplied by 2 + `shape`, and delta by the mean of K. The factor 2 + `shape` does
    not depend on this mean. For a Poisson distribution of K, see the formal guarantees.

    Args:
        one_run: the guarantee of one run, which includes its score. gamma must be 0.
        runs: the mean of K, above 1 and at most 10^4.
        shape: the distribution of K: 1 is geometric, 0 is logarithmic, and other numbers in (-1, 1]
            are truncated negative binomial. `math.inf` is a Poisson distribution, with which there
            may be no run at all.

    Returns:
        A `Guarantee`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a parameter is out of range, or the guarantee has a gamma.

    Formal guarantees:
        Let every run have the given guarantee, and let K be independent of the records. Then the
        best run is (epsilon', delta')-DP, with delta' = E[K] delta. epsilon' is (2 + shape)
        epsilon, or epsilon + E[K] tanh(epsilon / 2) for a Poisson distribution. The score may be
        any function of the result of a run. docs/proofs/tuning.md has the proof. Numbers are
        rounded up.

    Source:
        Liu and Talwar (2019), Theorem 3.2; Papernot and Steinke (2022), Theorem 2 and Section 3.

    Example:
        >>> import dpjax
        >>> one = dpjax.laplace(1.0, epsilon=0.5).guarantee
        >>> dpjax.accounting.best_of_runs(one, runs=10)
        (epsilon=1.5, delta=0)-DP, under replace-one, best of a random number of runs
    """
    known = compose(one_run)
    law = checked_repetitions(runs, shape)
    if known.gamma or known.confidence != 1:
        raise ValueError(
            "one_run must have gamma=0 and confidence=1, because all runs use the same random pair"
            f" of databases, got {one_run}"
        )
    delta = min(1.0, float(known.delta) * law.mean * _OUTWARD)
    epsilon = _by_ratios(float(known.epsilon), law)
    notes = (*known.notes, NOTE)
    return dataclasses.replace(known, epsilon=epsilon, delta=delta, replacing=None, notes=notes)


NOTE = "best of a random number of runs"


def dp_sgd_best_of_runs(
    sampling: Sampling,
    *,
    noise_multiplier: float,
    steps: int,
    delta: float,
    dims: int,
    runs: float,
    shape: float = 1.0,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
) -> Guarantee:
    """The guarantee of the best of a random number of runs of DP-SGD.

    Args:
        sampling: how batches are drawn.
        noise_multiplier: z, as for `dp_sgd`.
        steps: the number of steps of one run.
        delta: the delta of the guarantee, in (0, 1).
        dims: how many numbers get noise in a step.
        runs: the mean number of runs, as for `best_of_runs`.
        shape: the distribution of the number of runs, as for `best_of_runs`.
        relation: which databases are neighbors, as for `dp_sgd`.
        privacy_unit: the unit that the sampling draws, as for `dp_sgd`.

    Returns:
        A `Guarantee`, for runs whose scores read the result of the run and public data alone.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or as `dp_sgd` does.

    Formal guarantees:
        (epsilon, delta)-DP of the best run. epsilon is the smaller one of two bounds: the bound of
        `best_of_runs`, from the epsilon of one run at delta / E[K]; and the bound of Papernot and
        Steinke on Renyi divergences. Both include all costs that `dp_sgd` lists.
        docs/proofs/tuning.md has the proof.

    Source:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (2022),
        Theorems 2 and 6.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> dpjax.accounting.dp_sgd_best_of_runs(
        ...     sampling, noise_multiplier=1.5, steps=100, delta=1e-5, dims=10, runs=10, shape=0
        ... ).epsilon < 2 * dpjax.accounting.dp_sgd(
        ...     sampling, noise_multiplier=1.5, steps=100, delta=1e-5, dims=10
        ... ).epsilon
        True
    """
    law = checked_repetitions(runs, shape)
    run = DpSgdRun(sampling, steps, delta, dims, relation, "pld").checked()
    check_privacy_unit(privacy_unit)
    z = _checks.concrete_positive("noise_multiplier", noise_multiplier)
    assert run.relation is not None
    slots = () if run.replaced else (f"in {sampling.n} public slots",)
    one = Guarantee(0.0, relation=run.relation, notes=slots, privacy_unit=privacy_unit)
    return selected([OneRun(one, (run, z))], law, run.delta)


def checked_repetitions(runs: float, shape: float) -> Repetitions:
    """Checks `runs` and `shape`, and returns the distribution of the number of runs."""
    for name, number in (("runs", runs), ("shape", shape)):
        _checks.host_only(name, number, "a concrete number")
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{name} must be a number, got {_checks.shown(number)}")
    if not 1 < runs <= 1e4:
        raise ValueError(f"runs must be above 1 and at most 10^4, got {runs}")
    if not (-1 < shape <= 1 or shape == math.inf):
        raise ValueError(f"shape must be above -1 and at most 1, or math.inf, got {shape}")
    return repetitions(float(runs), float(shape))


def selected(candidates: Sequence[OneRun], law: Repetitions, delta: float) -> Guarantee:
    """Returns the guarantee of the best run, if each run trains a randomly chosen candidate.

    All guarantees must be for the same relation and the same privacy unit.
    """
    each = delta / law.mean / _OUTWARD
    bounds = [max(_epsilon_of_one(one, each) for one in candidates)]
    bounds = [_by_ratios(bound, law) for bound in bounds]
    if delta and all(one.training or not one.guarantee.delta for one in candidates):
        bounds.append(_by_divergences(candidates, law, delta))
    epsilon = min(bounds)
    if not math.isfinite(epsilon):
        raise NoEpsilonError(
            f"delta={delta:g} is too small for the best of about {law.mean:.3g} runs: use a larger"
            " delta, more noise or fewer runs"
        )
    first = candidates[0].guarantee
    notes = dict.fromkeys(note for one in candidates for note in one.guarantee.notes)
    return Guarantee(
        epsilon,
        delta,
        relation=first.relation,
        notes=(*notes, NOTE),
        privacy_unit=first.privacy_unit,
    )


def _epsilon_of_one(one: OneRun, delta: float) -> float:
    """Returns the epsilon of one run at a delta; infinite if there is no finite epsilon."""
    if one.training is None:
        within = float(one.guarantee.delta) <= delta
        return float(one.guarantee.epsilon) + one.score_epsilon if within else math.inf
    run, z = one.training
    try:
        return run._replace(delta=delta).epsilon(z) + one.score_epsilon if delta else math.inf
    except NoEpsilonError:
        return math.inf


def _by_ratios(epsilon: float, law: Repetitions) -> float:
    """Returns an epsilon of the best run, given that one run is epsilon-DP.

    It bounds the log of the ratio of the best run's probabilities on two neighbors.
    """
    if law.shape is None:
        return (epsilon + law.mean * math.tanh(epsilon / 2)) * _OUTWARD
    factor = float(2 + law.shape)
    return epsilon * factor if factor in (2.0, 3.0) else epsilon * factor * _OUTWARD


def _by_divergences(candidates: Sequence[OneRun], law: Repetitions, delta: float) -> float:
    """Returns the epsilon of the best run, by Renyi divergences.

    The noise and the batches of a real run differ slightly from ideal ones. In one run, the
    difference adds a privacy loss of at most x, except with probability y. In K runs, it adds at
    most K x, except with a probability of at most K y. Part of delta pays for the exceptions. If no
    part of delta is left, the result is infinite.
    """
    divergences = np.max([_divergences_of_one(one) for one in candidates], axis=0)
    best = divergences_of_best(divergences, law)
    trainings = [one.training[0] for one in candidates if one.training]
    loss = max((run.loss for run in trainings), default=0.0)
    missed = max((run.missed for run in trainings), default=0.0)
    if loss:
        most = _most_runs(law, _RARE * delta)
        loss, missed = most * loss, law.mean * missed + law.tail(most)
    return real_epsilon(functools.partial(epsilon_by_renyi, best), delta, loss, missed)


def _divergences_of_one(one: OneRun) -> np.ndarray:
    """Bounds the Renyi divergences between one run's outputs on two neighbors, for all `ORDERS`.

    The noise and the batches of the run are taken to be ideal.
    """
    if one.training is None:
        return divergences_of_pure(float(one.guarantee.epsilon) + one.score_epsilon)
    run, z = one.training
    ideal = composed_divergences(run.sampling, *run.gaussians(z), run.replaced)
    return ideal + divergences_of_pure(one.score_epsilon)


def divergences_of_pure(epsilon: float) -> np.ndarray:
    """Returns the Renyi divergences of randomized response, for all `ORDERS`.

    They are the largest of all epsilon-DP mechanisms.
    """
    orders = np.array(ORDERS)
    kept, lied = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    moments = np.logaddexp(orders * kept + (1 - orders) * lied, orders * lied + (1 - orders) * kept)
    return np.clip(moments / (orders - 1) * _OUTWARD + 1e-12, 0, epsilon) if epsilon else 0 * orders


def divergences_of_best(divergences: np.ndarray, law: Repetitions) -> np.ndarray:
    """Returns the Renyi divergences of the best run, from those of one run, for all `ORDERS`.

    They follow from Theorem 2 of Papernot and Steinke (2022) if the number of runs has a truncated
    negative binomial distribution, and from Theorem 6 if it has a Poisson distribution.
    """
    orders = np.array(ORDERS)
    of_mean = math.log(law.mean) / (orders - 1)
    if law.shape is None:
        accounting = _checks.extra("dp_accounting", "accounting")
        limits = np.log1p(1 / (orders - 1))
        deltas = [
            accounting.rdp.rdp_privacy_accountant.compute_delta(
                orders, divergences, limit / _OUTWARD
            )[0]
            for limit in limits
        ]
        best = divergences + law.mean * np.array(deltas) * _OUTWARD + of_mean
    else:
        to_all = (1 - 1 / orders) * divergences - math.log(law.gamma) / orders
        best = divergences + float(1 + law.shape) * np.min(to_all) + of_mean
    return np.maximum(best, 0) * _OUTWARD + 1e-12


def _most_runs(law: Repetitions, rare: float) -> int:
    """Returns a number of runs that is exceeded with a probability of at most `rare`."""
    most = 1
    while law.tail(most) > rare:
        most *= 2
    enough = range(most // 2 + 1, most + 1)
    return enough[bisect.bisect_left(enough, True, key=lambda runs: law.tail(runs) <= rare)]
