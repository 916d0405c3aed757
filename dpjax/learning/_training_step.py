"""A step of `fit` as one compiled program, which later trainings of the same structure reuse.

JAX caches compiled programs by the identity of a function object, so equal calls of `fit` would
compile equal programs again. Here a loss and an optimizer are traced at every call, and equal
traces share a program. Numbers are arguments of the program: clip norms, the noise multiplier, the
batch size, and the numbers in the optimizer's code. So changing a number does not compile
anything.

An array or a number that the loss closes over is a part of its trace. If this array or number
changes, a new program is compiled.

The file also reads and writes the checkpoints of trainings and tunings.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, Key, PyTree
from dpjax._exact._numerics import is_key
from dpjax._files._chunk_files import check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, alone, check_folder
from dpjax._tracing import _walks
from dpjax._tracing._contents import with_own_arrays
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import configuration, kept_jit
from dpjax.learning._clipping import ClippedGradients
from dpjax.learning._correlated_noise import CorrelatedNoiseState, correlated_average
from dpjax.learning._gaussian_noise import NoiseState, noisy_average
from dpjax.learning._per_example import FixedLoss, inlined, perform
from dpjax.learning._sampling import BatchSampling
from dpjax.targets._optax_training import optax_promotion

_KIND = "training"


class TrainingFile(contextlib.ExitStack):
    """A checkpoint: a file with an epoch and a state, used by one process at a time.

    Without a path, all methods do nothing.
    """

    def __init__(self, path: str | os.PathLike[str] | None, run: Json) -> None:
        """Refuses a path that cannot be a file. `run` describes the training in public values."""
        super().__init__()
        self._path = None if path is None else pathlib.Path(os.fspath(path))
        # Converts tuples to lists, because JSON has no tuples and the file is compared with this
        # value.
        self._run = json.loads(json.dumps(run))
        if self._path is not None:
            check_folder(self._path, "checkpoint")
            if self._path.is_dir():
                raise ValueError(f"checkpoint {self._path} must be a file, but it is a folder")

    def __enter__(self) -> Self:
        """Locks the file, or raises an error if another process uses it.

        Otherwise both processes would use the same keys.
        """
        if self._path is not None:
            lock = self._path.with_name(f"{self._path.name}.lock")
            refusal = f"checkpoint {self._path} is used by another training: name another file"
            self.enter_context(alone(lock, refusal))
        return self

    def read(self, like: PyTree) -> tuple[int, PyTree] | None:
        """Returns the stored epoch and state, or None. `like` has the structure of the state."""
        if self._path is None:
            return None
        files = read_chunks(self._path.parent, re.escape(self._path.name), _KIND)
        if not files:
            return None
        (file,) = files
        check_run(file, self._run, f"checkpoint {self._path}", place="file")
        leaves, structure = jax.tree.flatten(like)
        kept = [_restored(x, leaf) for x, leaf in zip(file.arrays, leaves, strict=True)]
        return int(file.header["epoch"]), jax.tree.unflatten(structure, kept)

    def write(self, epoch: int, state: PyTree) -> None:
        """Replaces the stored epoch and state. The data are on disk when this method returns."""
        if self._path is not None:
            arrays = [np.asarray(words(leaf)) for leaf in jax.tree.leaves(state)]
            header = {"run": self._run, "epoch": epoch}
            write_chunks(self._path, _KIND, header, arrays, secret=True)

    def remove(self) -> None:
        """Deletes the file, because its keys are no longer needed."""
        if self._path is not None:
            self._path.unlink()


def words(leaf: jax.Array) -> jax.Array:
    """Returns the key data of a key, or any other array unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _restored(array: np.ndarray, leaf: jax.Array) -> jax.Array:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)


if TYPE_CHECKING:
    import optax

# The number of cached programs is limited, because each contains copies of the arrays that its loss
# closes over.
_MOST_KEPT = 8


class Training(NamedTuple):
    """The state of a training between two steps. It contains secret keys."""

    parameters: PyTree
    optimizer: PyTree
    noise: NoiseState | CorrelatedNoiseState
    batches: Key

    @property
    def counts(self) -> NoiseState:
        """Returns the part of the noise state that counts steps and contains the key."""
        return self.noise.noise if isinstance(self.noise, CorrelatedNoiseState) else self.noise

    def with_counts(self, **changed: object) -> "Training":
        """Returns this state with some fields of `counts` replaced."""
        counts = dataclasses.replace(self.counts, **changed)
        if isinstance(self.noise, CorrelatedNoiseState):
            return self._replace(noise=dataclasses.replace(self.noise, noise=counts))
        return self._replace(noise=counts)


class Numbers(NamedTuple):
    """The public numbers of a training that its program takes as arguments.

    Attributes:
        clip_norm: the clip norm of each subtree of the parameters.
        noise_multiplier: the noise multiplier of every step.
        least_noise: the noise multiplier, rounded down. The state of the noise stores it.
        batch_size: the divisor of a noisy sum.
        of_optimizer: the numbers in the code of the optimizer.
    """

    clip_norm: PyTree
    noise_multiplier: float
    least_noise: float
    batch_size: float
    of_optimizer: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class FixedUpdate:
    """The traced update of an optimizer. The optimizer's numbers are arguments of the program.

    Two fixed updates are equal if they compute the same results from equal numbers.

    Attributes:
        program: maps numbers, and the leaves of gradient, state and parameters, to the leaves of
            new parameters and of the new state.
        outputs: the structure of the results.
        fingerprint: a fingerprint of the program.
    """

    program: jex.ClosedJaxpr = dataclasses.field(compare=False)
    outputs: Any = dataclasses.field(hash=False)
    fingerprint: str

    def __call__(
        self, numbers: list[np.ndarray], gradient: PyTree, state: PyTree, parameters: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Returns the new parameters and the new optimizer state."""
        leaves = [*numbers, *jax.tree.leaves((gradient, state, parameters))]
        return jax.tree.unflatten(self.outputs, _walks.run(self.program, leaves, perform))


def fixed_update(
    optimizer: "optax.GradientTransformation", state: PyTree, parameters: PyTree
) -> tuple[FixedUpdate, list[np.ndarray]]:
    """Traces the update of an optimizer, and collects the numbers in its code.

    Such a number is, for example, the learning rate.
    """
    import optax  # Importing optax takes half a second.

    def update(gradient: PyTree, state: PyTree, parameters: PyTree) -> tuple[PyTree, PyTree]:
        with optax_promotion():
            updates, after = optimizer.update(gradient, state, parameters)
            return optax.apply_updates(parameters, updates), after

    arguments = jax.eval_shape(lambda *arrays: arrays, parameters, state, parameters)
    traced, shapes = jax.make_jaxpr(update, return_shape=True)(*arguments)
    leaves = jax.tree.leaves(arguments)
    plain = inlined(traced, leaves)
    found = [_number(atom) for equation in plain.jaxpr.eqns for atom in equation.invars]
    numbers = [number for number in found if number is not None]

    def with_numbers(numbers: list[jax.Array], *leaves: jax.Array) -> list[jax.Array]:
        given = iter(numbers)

        def operation(equation: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(equation.invars, operands, strict=True)
            operands = [x if _number(atom) is None else next(given) for atom, x in pairs]
            return perform(equation, operands)

        return _walks.run(plain, leaves, operation)

    program = with_own_arrays(jax.make_jaxpr(with_numbers)(numbers, *leaves))
    fingerprint = digest(program, configuration())
    return FixedUpdate(program, jax.tree.structure(shapes), fingerprint), numbers


def _number(atom: _walks.Atom) -> np.ndarray | None:
    """Returns the value of an operand that is a literal float; None for any other operand."""
    if not isinstance(atom, jex.Literal) or np.ndim(atom.val):
        return None
    dtype = _walks.aval(atom).dtype
    return np.asarray(atom.val, dtype) if jnp.issubdtype(dtype, jnp.floating) else None


@kept_jit("loss", "update", "sampling", "microbatch_size", most=_MOST_KEPT)
def step(
    now: Training,
    records: Database,
    numbers: Numbers,
    *,
    loss: FixedLoss,
    update: FixedUpdate,
    sampling: BatchSampling,
    microbatch_size: int,
) -> Training:
    """Runs one step of a training, and returns the next state."""
    count, present = now.counts.step, None
    if isinstance(records, PaddedRecords):
        records, present = records.records, records.present.astype(bool)
    # If the sampling uses bins, every step needs the same key, because this key assigns records to
    # bins. Other samplings need a new key for each step.
    key = now.batches if sampling.one_key else jax.random.fold_in(now.batches, count)
    batch = sampling(key, present, step=None if sampling.groups == 1 else count)
    examples = jax.tree.map(lambda column: column[batch.indices], records)
    clipped = ClippedGradients(loss, numbers.clip_norm, microbatch_size)
    total = clipped(now.parameters, examples, batch, clip_norm=numbers.clip_norm)
    of_noise = numbers.noise_multiplier, numbers.least_noise, numbers.batch_size
    if isinstance(now.noise, CorrelatedNoiseState):
        gradient, noise = correlated_average(total, now.noise, *of_noise)
    else:
        gradient, noise = noisy_average(total, now.noise, *of_noise)
    parameters, inner = update(numbers.of_optimizer, gradient, now.optimizer, now.parameters)
    return Training(parameters, inner, noise, now.batches)
