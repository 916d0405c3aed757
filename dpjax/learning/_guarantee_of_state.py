"""Computes the guarantee of a training from the state of its noise after the last step."""

import dataclasses
from typing import Any

import numpy as np

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._dp_sgd import AccountingMethod, DpSgdRun, dp_sgd
from dpjax.accounting._monte_carlo import SimulatedLosses
from dpjax.learning._correlated_noise import CorrelatedNoiseState
from dpjax.learning._gaussian_noise import AdaptiveNoiseState, NoiseState, check_precision
from dpjax.learning._participation import ParticipationLosses
from dpjax.learning._sampling import BatchSampling, number_of
from dpjax.random._keys import is_seeded
from dpjax.release._mechanism import nothing_promised


def guarantee(
    state: NoiseState | AdaptiveNoiseState | CorrelatedNoiseState,
    sampling: BatchSampling,
    *,
    delta: float,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
    method: AccountingMethod = "pld",
    simulated: SimulatedLosses | None = None,
) -> Guarantee:
    """The guarantee of publishing all results of the steps so far.

    The number of steps, the noise multiplier and the number of parameters are read from the state
    of the noise. So the guarantee describes the actual training, not a plan.

    Args:
        state: the state from `gaussian_noise`, `adaptive_noise` or `correlated_noise`, after the
            last step.
        sampling: the sampling that drew the batches.
        delta: the delta of the guarantee, in (0, 1).
        relation: which databases are neighbors, as for `accounting.dp_sgd`.
        privacy_unit: the unit that the sampling draws, as for `accounting.dp_sgd`.
        method: "pld" or "renyi", see `accounting.dp_sgd`.
        simulated: privacy losses that `accounting.monte_carlo` drew from `participation_losses`.
            They account for the amplification by a `balls_in_bins_sampling` or a
            `min_separation_sampling`. The guarantee then has the confidence of the simulation.

    Returns:
        A `Guarantee`. If a seeded key was used, a note says so. For noise in floats, the guarantee
        is void.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if the state is not a state of the noise, or is traced.
        ValueError: if no step was made, if the state is a batch of states, if another sampling
            drew the batch of some step, if losses were simulated for another training or relation,
            or as `accounting.dp_sgd` does.

    Formal guarantees:
        The guarantee of `accounting.dp_sgd`, under three conditions: `sampling` drew every batch
        from a separate secret key (if `sampling.one_key` is True, all batches from one secret key
        that no other training uses); `clipped_gradients` took the batch and its records; and every
        step used the state of the step before. If you chose the records yourself, with a mask or
        True, the guarantee assumes that the sampling drew them.

    Source:
        See `accounting.dp_sgd`.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        >>> noise = learning.gaussian_noise(
        ...     dpjax.random.secure_key(), noise_multiplier=1.0, batch_size=10
        ... )
        >>> batch = clipped(jnp.zeros(2), jnp.ones((9, 2)), True)
        >>> _, state = noise.update(batch, noise.init(jnp.zeros(2)))
        >>> sampling = learning.poisson_sampling(1000, batch_size=10)
        >>> learning.guarantee(state, sampling, delta=1e-5)
        (epsilon=0.199451, delta=1e-05)-DP, under add-or-remove-one, in 1000 public slots
    """
    noise = state.noise if isinstance(state, (AdaptiveNoiseState, CorrelatedNoiseState)) else state
    if not isinstance(noise, NoiseState):
        raise TypeError(
            "state must be a state of gaussian_noise, adaptive_noise or correlated_noise (for a"
            f" state of optax.chain, pass its first element), got {_checks.described(state)}"
        )
    strategy = state.strategy if isinstance(state, CorrelatedNoiseState) else None
    # A caller may pass only the `NoiseState` inside of a `CorrelatedNoiseState`. A `NoiseState`
    # does not contain the strategy.
    if strategy is None and sampling.groups < noise.bands:
        raise ValueError(
            f"sampling must have at least {noise.bands} groups, one for each band of the "
            f"strategy, got {sampling}: otherwise two batches with the same record would affect "
            "the same published number. Draw batches by learning.cyclic_sampling"
        )
    if strategy is None and simulated is not None and noise.bands > 1:
        raise ValueError(
            "state must be the whole state of correlated_noise if simulated is given, got only its"
            f" field noise, with bands={noise.bands}: the guarantee depends on the strategy, and"
            " only the whole state contains the strategy"
        )
    _checks.host_only("state", noise.step, "it outside")
    if strategy is not None and np.max(noise.step) > strategy.steps:
        raise ValueError(
            f"state must have taken at most the {strategy.steps} steps of its strategy, got"
            f" {noise.step} steps: train again with a strategy of more steps"
        )
    if np.ndim(noise.step) or np.ndim(noise.noise_multiplier):
        raise ValueError(
            "state must be the state of one training, got a batch of states with steps of shape "
            f"{np.shape(noise.step)}: select one, as by jax.tree.map(lambda x: x[0], state)"
        )
    if noise.step == 0:
        raise ValueError("state must be what update returned after the last step, got that of init")
    if noise.noise == "float" or noise.noise_multiplier == 0:
        added = NeighboringRelation.ADD_OR_REMOVE_ONE
        return nothing_promised(0.0, relation_or_inherited(relation, added), privacy_unit)
    check_precision(noise)
    seeded = _by_seeded_keys(noise, sampling)
    multiplier, steps, dims = float(noise.noise_multiplier), int(noise.step), noise.dims
    run = dict[str, Any](
        steps=steps, delta=delta, dims=dims, strategy=strategy, relation=relation, method=method
    )
    if simulated is None:
        promised = dp_sgd(sampling, noise_multiplier=multiplier, privacy_unit=privacy_unit, **run)
    else:
        _check_covered(simulated, sampling, state, noise)
        promised = _by_simulation(simulated, DpSgdRun(sampling, **run).checked(), privacy_unit)
    if seeded or is_seeded(noise.key):
        promised = dataclasses.replace(promised, notes=(*promised.notes, "seeded key"))
    return promised


def _by_seeded_keys(state: NoiseState, sampling: BatchSampling) -> bool:
    """Whether seeded keys drew the batches. Refuses a sampling that did not draw all batches."""
    drawn_by = int(state.drawn_by)
    numbers = {number_of(sampling, seeded=seeded): seeded for seeded in (False, True)}
    if drawn_by and drawn_by not in numbers:
        raise ValueError(
            f"sampling must be the sampling that drew the batches of all steps, got {sampling}: "
            "some batches came from another sampling, from both seeded and secret keys, or from "
            "records that you chose yourself. Account for each kind of step by accounting.dp_sgd"
        )
    return numbers.get(drawn_by, False)


def _check_covered(
    simulated: SimulatedLosses, sampling: BatchSampling, state: object, noise: NoiseState
) -> None:
    """Raises an error for losses that were simulated for less noise or for another training."""
    losses = getattr(simulated, "source", simulated)
    if not isinstance(losses, ParticipationLosses):
        raise TypeError(
            "simulated must be made by accounting.monte_carlo from learning.participation_losses,"
            f" got losses of {_checks.shown(losses)}"
        )
    strategy, fineness = None, losses.fineness
    if isinstance(state, CorrelatedNoiseState):
        strategy, fineness = state.strategy, state.fineness
    quieter = losses.noise_multiplier <= noise.noise_multiplier and losses.fineness <= fineness
    asked = {
        # Losses may be simulated only if nobody can tell which batches contain a record. This is
        # true if one key draws all batches. It is not true in cyclic sampling, where the index of a
        # slot shows the group of the slot.
        "sampling": (losses.sampling == sampling and sampling.one_key, sampling),
        "strategy": (losses.strategy == strategy, strategy),
        "dims": (losses.dims == noise.dims, noise.dims),
        "steps": (losses.steps >= noise.step, noise.step),
        "noise_multiplier": (quieter, noise.noise_multiplier),
    }
    for name, (covered, ours) in asked.items():
        if not covered:
            raise ValueError(
                f"simulated must cover this training, which has {name}={ours}, got losses that"
                f" were simulated for {name}={getattr(losses, name)}"
            )


def _by_simulation(simulated: SimulatedLosses, run: DpSgdRun, privacy_unit: str) -> Guarantee:
    if run.replaced:
        raise ValueError(
            f"relation must be add-or-remove-one for simulated losses, got {run.relation}: to use"
            " this relation, leave out the argument simulated"
        )
    epsilon = run.charged(simulated.epsilon)
    drawn = dataclasses.replace(simulated, relation=run.relation, privacy_unit=privacy_unit)
    notes = (f"in {run.sampling.n} public slots",)
    return drawn.stated(epsilon, run.delta, notes)
