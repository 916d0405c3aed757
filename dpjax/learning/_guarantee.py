"""The guarantee of the steps that a training took."""

import dataclasses

import numpy as np

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._dp_sgd import AccountingMethod, dp_sgd
from dpjax.learning._adaptive_clipping import AdaptiveNoiseState
from dpjax.learning._gaussian_noise import NoiseState, check_precision
from dpjax.learning._sampling import BatchSampling, number_of
from dpjax.mechanisms._mechanism import nothing_promised
from dpjax.random._facade import is_seeded


def guarantee(
    state: NoiseState | AdaptiveNoiseState,
    sampling: BatchSampling,
    *,
    delta: float,
    relation: NeighboringRelation | None = None,
    method: AccountingMethod = "pld",
) -> Guarantee:
    """The guarantee of publishing all results of the steps so far.

    Steps, noise multiplier and number of parameters are read from the state of the noise. So the
    guarantee is that of the actual training, not of a plan.

    Args:
        state: of `gaussian_noise` or `adaptive_noise`, after the last step.
        sampling: drew the batches.
        delta: of the guarantee, in (0, 1).
        relation: which databases are neighbors, as for `accounting.dp_sgd`.
        method: "pld" or "renyi", see `accounting.dp_sgd`.

    Returns:
        A `Guarantee`; under a seeded key it says so, and noise in floats promises nothing.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if the state is not one of noise, or is traced.
        ValueError: if no step was taken, if the state is a batch of states, if another sampling
            drew the batch of some step, or as `accounting.dp_sgd` does.

    Formal guarantees:
        Those of `accounting.dp_sgd`, if `sampling` drew every batch from a secret key of its own,
        `clipped_gradients` took the batch and its records, and every state followed the last one.
        Batches of your own choice, with a mask or True, are taken for batches of the sampling.

    Source:
        Those of `accounting.dp_sgd`.

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
    given: object = state
    noise = given.noise if isinstance(given, AdaptiveNoiseState) else given
    if not isinstance(noise, NoiseState):
        raise TypeError(
            "state must be that of gaussian_noise or adaptive_noise, the first of a chain's, got"
            f" {_checks.described(state)}"
        )
    _checks.host_only("state", noise.step, "it outside")
    if np.ndim(noise.step) or np.ndim(noise.noise_multiplier):
        raise ValueError(
            f"state must be that of one training, got steps of shape {np.shape(noise.step)}: take"
            " one, as by jax.tree.map(lambda x: x[0], state)"
        )
    if noise.step == 0:
        raise ValueError(
            "state must be that after the last step, which update returned, got that of init:"
            " nothing was released, and nothing is promised"
        )
    if noise.noise == "float":
        added = NeighboringRelation.ADD_OR_REMOVE_ONE
        return nothing_promised(0.0, relation_or_inherited(relation, added))
    check_precision(noise)
    seeded = _by_seeded_keys(noise, sampling)
    promised = dp_sgd(
        sampling,
        noise_multiplier=float(noise.noise_multiplier),
        steps=int(noise.step),
        delta=delta,
        dims=noise.dims,
        relation=relation,
        method=method,
    )
    if seeded or is_seeded(noise.key):
        promised = dataclasses.replace(promised, notes=(*promised.notes, "seeded key"))
    return promised


def _by_seeded_keys(state: NoiseState, sampling: BatchSampling) -> bool:
    """Whether seeds drew the batches; refuses a sampling that did not draw all of them."""
    drawn_by = int(state.drawn_by)
    numbers = {number_of(sampling, seeded=seeded): seeded for seeded in (False, True)}
    if drawn_by and drawn_by not in numbers:
        raise ValueError(
            f"sampling must be the one that drew the batches of all steps, got {sampling}: batches"
            " of another sampling, of seeded keys beside secret ones, or of records of your own"
            " choice were among them. Account for each kind of steps by accounting.dp_sgd"
        )
    return numbers.get(drawn_by, False)
