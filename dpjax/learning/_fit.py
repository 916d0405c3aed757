"""`fit`: a whole private training in one call, with its guarantee and checkpoints."""

import dataclasses
import functools
import importlib.metadata
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD
from dpjax._core._losses import Risk
from dpjax._core._open_ledgers import Payment, relation_or_inherited
from dpjax._core._open_ledgers import Training as Steps
from dpjax._core._records import PaddedRecords, record_arrays
from dpjax._core._training_record import RISK_OF_TRAINING, TrainingRecord
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax._exact._numerics import outward
from dpjax._files._durable import Json
from dpjax._running._progress import counting
from dpjax._tracing._fingerprints import digest
from dpjax._version import __version__
from dpjax.accounting._compose_at import risk
from dpjax.accounting._dp_sgd import DpSgdRun, dp_sgd, dp_sgd_risk, least_capacity, rare_enough
from dpjax.accounting._least_noise import dp_sgd_noise_multiplier
from dpjax.accounting._ledger import Ledger
from dpjax.accounting._monte_carlo import SimulatedLosses
from dpjax.learning._clipping import clipped_gradients
from dpjax.learning._correlated_noise import initial_state
from dpjax.learning._gaussian_noise import first_state, rounded_down
from dpjax.learning._guarantee_of_state import guarantee
from dpjax.learning._per_example import fixed_loss
from dpjax.learning._sampling import RARE, BatchSampling, cyclic_sampling, poisson_sampling
from dpjax.learning._strategies import MAKERS, Strategy
from dpjax.learning._training_step import (
    FixedUpdate,
    Numbers,
    Training,
    TrainingFile,
    fixed_update,
    words,
)
from dpjax.learning._training_step import step as training_step
from dpjax.learning._trainings import Trainings
from dpjax.learning._tune import inside_a_run
from dpjax.queries._truncation import ROWS, THERE, Truncation, padded_people
from dpjax.random._keys import check_key
from dpjax.targets._optax_training import optax_promotion

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The public facts of a training after one of its epochs, for `evaluate` of `fit`.

    Attributes:
        number: the number of finished epochs, at least 1.
        epochs: the number of all epochs.
        step: the number of finished steps.
        steps: the number of all steps.

    Formal guarantees:
        All facts depend on arguments and shapes alone. The sizes of the drawn batches, and how
        often gradients were clipped, are private, so they are not among them.
    """

    number: int
    epochs: int
    step: int
    steps: int
    _promised: Callable[[int], Guarantee] = dataclasses.field(repr=False, compare=False)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the parameters of the finished epochs.

        It says what was spent so far. If `evaluate` stops the training, the release still has the
        guarantee of all planned epochs: `evaluate` saw results before it decided to stop.
        """
        return self._promised(self.step)


@inside_a_run
def fit(
    key: Key,
    loss: Callable[[PyTree, PyTree], PyTree],
    parameters: PyTree,
    *,
    database: Database,
    optimizer: "optax.GradientTransformation",
    epochs: int,
    clip_norm: PyTree,
    delta: float,
    batch_size: float | None = None,
    sampling: BatchSampling | None = None,
    strategy: Strategy | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    simulated: SimulatedLosses | None = None,
    relation: NeighboringRelation | None = None,
    person: str | int | None = None,
    rows: int | None = None,
    most_people: int | None = None,
    microbatch_size: int = 256,
    evaluate: Callable[[Epoch, PyTree], object] | None = None,
    ledger: Ledger | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Release:
    """Trains a model with DP-SGD: batches, clipping, noise, optimizer and accounting.

    Every step draws a batch by `poisson_sampling`, clips its gradients by `clipped_gradients`, adds
    noise by `gaussian_noise`, and passes the average to the optimizer. An epoch is n / batch_size
    steps, rounded up. If you give a strategy, noise comes from `correlated_noise`, and batches come
    from `cyclic_sampling` with as many groups as the strategy has bands. To draw batches in another
    way, pass `sampling`.

    A second training with the same loss, shapes, strategy and optimizer compiles nothing, even if
    its key, epsilon, clip norm or learning rate is different.

    n is the number of slots of the database. It is public, and the guarantee states this. Every row
    of an array is a slot with a record. If the number of records is private, put the records into a
    public number of slots by `queries.padded_records`. Empty slots are never in a batch.

    With `person`, each person may have several examples, and batches draw people. The gradients of
    a person's examples are averaged, and the average is clipped. So the guarantee is per person.

    Args:
        key: a key from `dpjax.random.secure_key`, used for nothing else.
        loss: `loss(parameters, example)`, of one example, as for `clipped_gradients`.
        parameters: the initial parameters, made without the private records.
        database: a pytree of arrays, or a table, with a common leading axis of n records, or
            `PaddedRecords` with n slots.
        optimizer: an optimizer of optax, without noise, such as `optax.adam(1e-3)`.
        epochs: at least 1.
        clip_norm: as for `clipped_gradients`.
        delta: the delta of the guarantee, in (0, 1).
        batch_size: the expected size of a batch if no slot is empty, public.
        sampling: given instead of batch_size; draws batches from the n slots.
        strategy: the strategy of correlated noise, for at least as many steps as the training has.
            None means independent noise.
        epsilon: the epsilon of the guarantee; the least noise multiplier for it is used.
        noise_multiplier: may be given instead of epsilon.
        simulated: simulated losses, as for `guarantee`. They need a noise multiplier.
        relation: which databases are neighbors; None for the relation of the ledger, else as for
            `accounting.dp_sgd`. n is public under both relations.
        person: the name of the database's column of person ids, if people have several rows. The
            loss gets the other columns. None if each record is a person.
        rows: how many rows of a person are used: the first rows. Public; required with `person`.
        most_people: the number of slots for people, as in `queries.padded_people`. Public; required
            with `person`, where this number takes the place of n.
        microbatch_size: as for `clipped_gradients`.
        evaluate: `evaluate(epoch, parameters)` is called after each epoch, to print or store
            something. `epoch` is an `Epoch`: the numbers of finished epochs and steps, and their
            guarantee. It covers these parameters, but not scores computed on private records. If
            the function returns True, the training ends with these parameters. Base this decision
            on public data. The guarantee is the guarantee of all epochs even if the training stops
            early, because the results decide when to stop. If it returns a text, a number, or a
            dictionary of numbers, such as a loss on public data, the progress bar shows them.
        ledger: pays for the training before it starts. Do not open it by `with`.
        checkpoint: a file that stores the last epoch. After an interruption, the same call
            continues from there, with the keys and the payment of the first call. A call with other
            arguments is refused; the values of the records are not compared. The file is removed at
            the end. It contains keys, so keep it secret, use one file for each training, and never
            restore an old copy.
        progress: shows a progress bar with the speed and the remaining time (needs tqdm).

    Returns:
        A `Release` of the last parameters, with the guarantee of the parameters of all epochs.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range; if both or none of epsilon and noise_multiplier
            are given, or both or none of batch_size and sampling; if the strategy has too few
            steps, or more bands than the sampling has groups; if a ledger is open; if the key was
            used before; or if the checkpoint belongs to another run, or is truncated or corrupted.
        BudgetExceededError: if the ledger has too little left.

    Formal guarantees:
        The release has the guarantee that `guarantee` reads from the last state of the noise. It
        follows from the guarantees of the sampling, of `clipped_gradients`, and of `gaussian_noise`
        or `correlated_noise`. Every step has its own keys. The ledger pays for the same guarantee
        before the training starts. If you give no sampling, a batch has enough slots that the
        possibility of exceeding them costs at most a thousandth of delta, in all steps together.

        With `person`, this guarantee is for databases that differ in all rows of one person. A
        person is one record of `queries.padded_people`, whose loss is the average over its rows.

        A resumed training repeats the steps since the checkpoint with the same keys. No two results
        with the same noise are published: an epoch is on the disk before `evaluate` or the caller
        sees its parameters, so nobody has seen the results of the steps that are repeated. On the
        same database the results equal those of a training without interruption, at the same
        guarantee.

    Source:
        Abadi et al. (2016).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import dpjax
        >>> def loss(w, example):
        ...     return (jnp.dot(w, example["x"]) - example["y"]) ** 2
        >>> release = dpjax.learning.fit(
        ...     dpjax.random.secure_key(), loss, jnp.zeros(2),
        ...     database={"x": jnp.ones((500, 2)), "y": jnp.ones(500)},
        ...     optimizer=optax.sgd(0.1), epochs=1, batch_size=50, clip_norm=1.0,
        ...     noise_multiplier=2.0, delta=1e-5,
        ... )
        >>> release.guarantee
        (epsilon=0.79847, delta=1e-05)-DP, under add-or-remove-one, in 500 public slots
    """
    _checks.host_only("fit", key, "clipped_gradients and gaussian_noise in a loop of your own")
    unit, notes = RECORD, ()
    if person is not None:
        database, loss, unit, notes = of_people(database, loss, person, rows, most_people)
    elif rows is not None or most_people is not None:
        raise TypeError("person must name the column of people if rows or most_people is given")
    records, n = record_arrays("database", database)
    for leaf in jax.tree.leaves((records, parameters)):
        _checks.host_only("fit", leaf, "clipped_gradients and gaussian_noise in a loop of your own")
    added = NeighboringRelation.ADD_OR_REMOVE_ONE
    relation = relation_or_inherited(relation, added, payer=ledger)
    delta = _checks.fraction("delta", delta)
    if evaluate is not None:
        _checks.function("evaluate", evaluate)
    if progress:
        _checks.extra("tqdm", "progress")
    planned = _planned_sampling(n, batch_size, sampling, strategy)
    size = float(planned.batch_size if batch_size is None else batch_size)
    # The rate of a sampling is rounded down, so its batch size may be slightly less than requested.
    # Without the subtraction of 1e-3, this small difference might add a step to each epoch.
    in_an_epoch = math.ceil(n / size - (1e-3 if batch_size is None else 0))
    epochs = _checks.integer("epochs", epochs, least=1)
    steps = in_an_epoch * epochs
    if strategy is not None and strategy.steps < steps:
        raise ValueError(
            f"strategy must have at least the {steps} steps of the training, got {strategy.steps}"
        )
    parameters = _checks.real_arrays("parameters", parameters)
    dims = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    given = dict[str, Any](
        delta=delta, relation=relation, steps=steps, dims=dims, strategy=strategy
    )
    sampling, multiplier = _sampling_and_noise(
        planned, sampling, epsilon, noise_multiplier, simulated, given
    )
    # The state rounds the multiplier down. So it is rounded up first, to keep the guarantee of the
    # state within the requested guarantee.
    multiplier = outward(multiplier, math.inf)
    trainings = Trainings(check_key(key))
    clipped = clipped_gradients(loss, clip_norm=clip_norm, microbatch_size=microbatch_size)
    one_loss = fixed_loss(loss, parameters, _example(records))

    # This dry run of one step raises any error of the call before the ledger pays.
    if strategy is None:
        unkeyed = first_state(key, parameters, multiplier)
    else:
        unkeyed = initial_state(key, parameters, strategy, multiplier)
    with optax_promotion():
        # Arrays that are made from Python floats are weakly typed, which a file cannot store. So
        # all arrays are converted to their dtype.
        inner = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), optimizer.init(parameters)
        )
    now = Training(parameters, inner, unkeyed, key)
    update, of_optimizer = fixed_update(optimizer, inner, parameters)
    numbers = Numbers(
        clipped.clip_norm, multiplier, float(rounded_down(multiplier)), size, of_optimizer
    )
    part = clipped.microbatch_size
    step = functools.partial(
        training_step, loss=one_loss, update=update, sampling=sampling, microbatch_size=part
    )
    jax.eval_shape(step, now, records, numbers)

    def promised(now: Training, step: int) -> Guarantee:
        state = now.with_counts(step=jnp.int32(step)).noise
        found = guarantee(
            state, sampling, delta=delta, relation=relation, privacy_unit=unit, simulated=simulated
        )
        return dataclasses.replace(found, notes=(*notes, *found.notes))

    # An `Epoch` computes its guarantee from `start`, the state before the training. So a caller may
    # keep an `Epoch` without keeping results of the training in memory.
    start, planned_guarantee = now, promised(now, steps)
    run: Json = {}
    if checkpoint is not None:
        run = {
            "loss": one_loss.fingerprint,
            "parameters": digest(jax.tree.leaves(parameters)),
            "optimizer": _of_optimizer(update, of_optimizer, inner),
            "database": _shapes(records),
            "state": _shapes(now),
            "sampling": list(dataclasses.astuple(sampling)),
            "strategy": None if strategy is None else strategy.number,
            "batch_size": size,
            "clip_norm": _texts(clipped.clip_norm),
            "microbatch_size": clipped.microbatch_size,
            "noise_multiplier": multiplier,
            "epochs": epochs,
            "delta": delta,
            "simulated": None if simulated is None else simulated._identity,
            "relation": str(relation),
            "people": [unit, *notes],
            "ledger": None if ledger is None else str(ledger.path),
        }
    with TrainingFile(checkpoint, run) as file:
        found = file.read(now)
        if found is None:
            own_key = trainings.key(parameters)
            if ledger is not None:
                whole = DpSgdRun(sampling, method="pld", **given).checked()
                steps_of_run = Steps(whole, float(start.counts.noise_multiplier), parameters)
                ledger.record(Payment(key, planned_guarantee, "training", training=steps_of_run))
            # No other training uses this key, so it can be split here.
            key_of_noise, of_batches = jax.random.split(own_key)
            now = now._replace(batches=of_batches).with_counts(key=key_of_noise)
            file.write(0, now)
        first, now = found or (0, now)
        with counting("steps", steps, done=first * in_an_epoch, shown=progress) as count:
            for epoch in range(first, epochs + 1):
                if epoch > first:
                    for _ in range(in_an_epoch):
                        now = step(now, records, numbers)
                        count(1)
                    # The file is written before `evaluate` or anybody else can see the results of
                    # this epoch.
                    file.write(epoch, now)
                if epoch and evaluate is not None:
                    at = functools.partial(promised, start)
                    done = Epoch(epoch, epochs, epoch * in_an_epoch, steps, at)
                    answer = evaluate(done, now.parameters)
                    if _stops(answer):
                        break
                    count(0, scores(answer))
        file.remove()
    record = TrainingRecord(
        steps=steps,
        batch_size=size,
        sampling=sampling.kind,
        slots=n,
        rate=sampling.rate,
        capacity=sampling.capacity,
        groups=sampling.groups,
        clip_norm=tuple(map(str, jax.tree.leaves(clipped.clip_norm))),
        noise_multiplier=float(start.counts.noise_multiplier),
        strategy=1 if strategy is None else strategy.bands,
        parameters=dims,
        loss=one_loss.fingerprint,
        optimizer=update.fingerprint,
        versions=_versions(),
    )
    # The guarantee counts all planned steps even if the training stopped early, because private
    # results may have decided when to stop.
    return Release(now.parameters, promised(now, steps), training=record)


def _stops(answer: Any) -> bool:
    """Whether `evaluate` returned True, as a Python, NumPy or JAX boolean."""
    return (isinstance(answer, bool) or _is_scalar(answer, np.bool_)) and bool(answer)


def scores(found: Any) -> str:
    """Formats the result of `evaluate` for the progress bar: a string, a number, or a dict."""
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        return ", ".join(f"{name}={scores(score)}" for name, score in found.items())
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if is_number or _is_scalar(found, np.floating, np.integer):
        return f"{float(found):.4g}"
    return ""


def _is_scalar(found: Any, *kinds: type) -> bool:
    """Whether `found` is an array without axes whose dtype is of one of these kinds."""
    is_array = isinstance(found, (np.ndarray, np.generic, jax.Array)) and found.ndim == 0
    return is_array and any(jnp.issubdtype(found.dtype, kind) for kind in kinds)


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    others = ("jax", "jaxlib", "optax", "dp-accounting")
    return (("dpjax", __version__), *((name, importlib.metadata.version(name)) for name in others))


def risk_of_training(training: TrainingRecord, guarantee: Guarantee) -> Risk:
    """Returns the risk of a training with this record and this guarantee.

    With correlated noise, several batches that contain one person may contribute to one published
    update. The training record does not say how much they overlap, so the risk is bounded by
    epsilon and delta alone.
    """
    if training.strategy > training.groups:
        return risk(guarantee)
    kind: Any = training.sampling
    drawn = training.slots, training.rate, training.capacity, training.groups
    return dp_sgd_risk(
        BatchSampling(kind, *drawn),
        noise_multiplier=training.noise_multiplier,
        steps=training.steps,
        dims=training.parameters,
        relation=guarantee.relation,
    )


RISK_OF_TRAINING.append(risk_of_training)


def _planned_sampling(
    n: int, batch_size: float | None, sampling: BatchSampling | None, strategy: Strategy | None
) -> BatchSampling:
    """Returns the given sampling, or one of this batch size with a slot for each record."""
    _checks.instance("strategy", strategy, Strategy | None, MAKERS)
    _checks.instance(
        "sampling", sampling, BatchSampling | None, "a function such as poisson_sampling"
    )
    _checks.exactly_one(batch_size=batch_size, sampling=sampling)
    bands = 1 if strategy is None else strategy.bands
    if sampling is None:
        assert batch_size is not None
        if bands == 1:
            return poisson_sampling(n, batch_size=batch_size, capacity=n)
        largest = -(-n // bands)
        return cyclic_sampling(n, groups=bands, batch_size=batch_size, capacity=largest)
    if sampling.n != n:
        raise ValueError(f"sampling must draw from the {n} slots of the database, got {sampling}")
    return sampling


def _sampling_and_noise(
    planned: BatchSampling,
    sampling: BatchSampling | None,
    epsilon: float | None,
    noise_multiplier: float | None,
    simulated: SimulatedLosses | None,
    given: dict[str, Any],
) -> tuple[BatchSampling, float]:
    """Returns how batches are drawn, and the noise multiplier.

    The noise multiplier is the given one, or else the least one for epsilon. If no sampling is
    given, batches are drawn as `planned`, but with fewer slots. The number of slots is the least at
    which oversized batches add almost nothing to delta. `given` contains the arguments that all
    functions of `accounting` need.
    """
    if simulated is not None and noise_multiplier is None:
        raise ValueError("noise_multiplier must be given with simulated losses, got None")
    _checks.exactly_one(epsilon=epsilon, noise_multiplier=noise_multiplier)
    reached = 0.0 if epsilon is None else _checks.positive("epsilon", epsilon)
    if noise_multiplier is not None:
        noise_multiplier = _checks.positive("noise_multiplier", noise_multiplier)
        if sampling is None:
            reached = float(dp_sgd(planned, noise_multiplier=noise_multiplier, **given).epsilon)
    if sampling is None:
        # Chooses the least number of slots at which oversized batches cost hardly any delta, at
        # this epsilon.
        rare = _rounded(rare_enough(reached, given["delta"], given["steps"]))
        capacity = least_capacity(planned.capacity, planned.rate, rare)
        sampling = dataclasses.replace(planned, capacity=capacity)
    if noise_multiplier is None:
        noise_multiplier = dp_sgd_noise_multiplier(sampling, epsilon=reached, **given)
    return sampling, noise_multiplier


def _rounded(rare: float) -> float:
    """Rounds a probability down to 10^-15, 10^-20, 10^-25 and so on, or 0.

    So trainings with similar epsilons have the same number of slots, and share a compiled program.
    """
    return min(RARE, 10.0 ** (5 * math.floor(math.log10(rare) / 5))) if rare else 0.0


def _example(records: Database) -> PyTree:
    """Returns the shapes and dtypes of one record."""
    if isinstance(records, PaddedRecords):
        records = records.records
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), records)


def _of_optimizer(update: FixedUpdate, numbers: list[np.ndarray], state: PyTree) -> str:
    """Returns a fingerprint of an optimizer: of its program, its numbers and its initial state."""
    return digest(update.fingerprint, numbers, [words(leaf) for leaf in jax.tree.leaves(state)])


def _shapes(tree: PyTree) -> list[str]:
    return _texts(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))


def _texts(tree: PyTree) -> list[str]:
    """Returns the leaves and the structure of a pytree as strings."""
    leaves, structure = jax.tree.flatten(tree)
    return [*map(str, leaves), str(structure)]


# The following functions train on people who have several examples each. The loss of a person is
# the average loss of that person's examples.


Loss = Callable[[PyTree, PyTree], Any]


def of_people(
    database: Database, loss: Loss, person: str | int, rows: int | None, most_people: int | None
) -> tuple[PaddedRecords, Loss, str, tuple[str, ...]]:
    """Makes the arguments of a training in which each record is a person.

    Returns:
        A database with one record for each person; the loss of one person; the privacy unit; notes
        for the guarantee.
    """
    if rows is None or most_people is None:
        raise TypeError(
            f"rows and most_people must be given with person, got {rows=}, {most_people=}"
        )
    if isinstance(database, PaddedRecords):
        raise TypeError("database must be a table of rows if person is given, not PaddedRecords")
    people = padded_people(database, person=person, rows=rows, capacity=most_people)
    truncation = Truncation(person, rows)
    return people, loss_of_person(loss), truncation.unit, (truncation.note,)


def loss_of_person(loss: Loss) -> Loss:
    """Returns the function that averages `loss` over the examples of a person.

    A missing example is replaced by the person's first example, with weight 0. It is not replaced
    by zeros: the gradient at zeros may be NaN, and 0 times NaN is NaN.
    """
    _checks.function("loss", loss)

    def of_person(parameters: PyTree, person: PyTree) -> jax.Array:
        there = person[THERE]

        def filled(leaf: jax.Array) -> jax.Array:
            return jnp.where(there.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])

        losses = jax.vmap(lambda example: loss(parameters, example))(
            jax.tree.map(filled, person[ROWS])
        )
        count = jnp.maximum(jnp.sum(there, dtype=losses.dtype), 1)
        return jnp.sum(jnp.where(there, losses, jnp.zeros_like(losses))) / count

    return of_person
