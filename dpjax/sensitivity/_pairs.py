"""Random pairs of neighboring databases, and the distance of the target's values on each pair."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, Value
from dpjax._core._values import Norm, Oracle, Positions, Target
from dpjax._exact._kernels import written
from dpjax._exact._numerics import compute_dtype
from dpjax._running._devices import Device, platform_of
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._host_calls import Role, sampled
from dpjax._tracing._lanes import refuse_touching, touching
from dpjax._tracing._programs import Program
from dpjax._tracing._threefry import drawn
from dpjax.oracles._independent import IndependentRecords
from dpjax.sensitivity._norms import (
    distance,
    norm_function,
    refuse_integers,
    resolution,
    traced_norm,
)
from dpjax.sensitivity._shaped_norm import NoiseShape
from dpjax.sensitivity._sums import Summable, SumOfRecords

# Pair i is drawn with the key fold_in(key, i). The last uint32 is reserved for deriving the keys of
# random positions.
MOST_SAMPLED_PAIRS = 2**32 - 1
_MOST_RECORDS = 2**31 - 2
_POSITION_DOMAIN = 2**32 - 1


def neighboring_pair(
    records: Database, position: jax.Array | int | None = None
) -> tuple[Database, Database]:
    """Splits n + 1 records into two databases of n that differ in one position.

    Algorithm 1 of Rubinstein and Aldà (2017): D = (x_1, ..., x_n), and D' is D with the record at
    `position` replaced by x_(n+1).

    Args:
        records: a pytree of arrays with leading axis n + 1, from one call of the oracle.
        position: index of the replaced record, from 0; None for the last record, as in the paper.

    Returns:
        D and D', pytrees with leading axis n.
    """
    database = jax.tree.map(lambda leaf: leaf[:-1], records)

    def replaced(leaf: jax.Array) -> jax.Array:
        n = leaf.shape[0] - 1
        changed = jnp.asarray(n - 1 if position is None else position, jnp.int32)
        # This uses `where` instead of a scatter, because accelerators do not fuse a scatter with
        # other operations.
        here = jnp.arange(n, dtype=jnp.int32) == changed
        return jnp.where(jnp.expand_dims(here, tuple(range(1, leaf.ndim))), leaf[-1], leaf[:-1])

    return database, jax.tree.map(replaced, records)


def random_rotations(words: np.ndarray, n: int, count: int) -> np.ndarray:
    """Draws the number of places by which to rotate each database, uniformly from 1 to n - 1.

    The host draws these numbers from the words of the key, because drawing them in the compiled
    program would double its compile time.
    """
    seed = int(digest("rotations", words), 16)
    drawn = np.random.Philox(key=seed).random_raw(count)
    return (1 + drawn % (max(n, 2) - 1)).astype(np.int32)


def rotated(database: Database, steps: jax.Array) -> Database:
    """Moves the last `steps` records of a database to the front."""
    return jax.tree.map(lambda leaf: jnp.roll(leaf, steps, axis=0), database)


def rotated_pair(records: Database, steps: jax.Array) -> Database:
    """Rotates the first n of n + 1 records; then replaces the last record of a copy.

    Record n + 1 is the replacement. One gather makes both databases, along a new axis. On a CPU,
    stacking two arrays would take as long as drawing the records.
    """

    def both(leaf: jax.Array) -> jax.Array:
        n = leaf.shape[0] - 1
        places = jnp.arange(n, dtype=jnp.int32)
        order = (places - steps) % n
        orders = jnp.stack([order, jnp.where(places == n - 1, n, order)])
        return jnp.take(leaf, orders, axis=0, mode="clip")

    return jax.tree.map(both, records)


@dataclasses.dataclass(frozen=True)
class RandomPair:
    """A random pair of neighboring databases, and the distance of the target's values on it.

    Its hash comes from the fingerprints of its programs, so it can be a static argument of `jit`.

    Attributes:
        target: maps n records to the value f. If the norm is a `NoiseShape`, it maps the records to
            A^-1 f.
        oracle: maps a key to n + 1 records.
        norm: maps the difference of two values to a number.
        positions: "last", "average" or "each".
        released: the target that a release calls, which does not multiply by A^-1.
        sums: the target as a function of a sum over records; None for other targets.
        two_records: maps a key and a position to the record at that position and its replacement.
            None unless records are independent and these two records determine the distance.
        shape: the norm, if it is a `NoiseShape`; None otherwise.
        in_range: whether the norm is "range". Its resolution is then measured by "linf".
    """

    target: Program
    oracle: Program
    norm: Program
    positions: Positions
    released: Program
    sums: SumOfRecords | None = None
    two_records: Program | None = None
    shape: NoiseShape | None = None
    in_range: bool = False

    @classmethod
    def trace(
        cls,
        key: Key,
        target: Target,
        oracle: Oracle,
        *,
        n: int,
        norm: Norm,
        positions: Positions,
    ) -> "RandomPair":
        """Traces target and oracle at n records, and refuses programs that cannot be sampled."""
        _checks.function("target", target)
        _checks.function("oracle", oracle)
        norm_of = norm_function(norm)
        _checks.choice("positions", positions, get_args(Positions))
        n = _checks.integer("n", n, least=1, most=_MOST_RECORDS)
        oracle_program = _traced_oracle(oracle, key, n)
        leaves = oracle_program.outputs.tree()
        database = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), leaves)
        target_program = released = Program.trace("target", target, database)
        shape = None
        if isinstance(norm, NoiseShape):
            _check_shape(norm, key, released)
            shape = norm
            # A release adds noise to A^-1 f, where A is the matrix of the noise shape. Distances
            # are measured between values of A^-1 f, so they include the rounding of this product.
            target_program = released.followed_by(norm.mapped)
            norm_of = norm_function("l2")
        value = target_program.outputs.tree()
        if in_range := isinstance(norm, str) and norm == "range":
            refuse_integers(value)
        norm_program = traced_norm(norm_of, value)
        refuse_touching("norm", norm_program.jaxpr)
        if norm_program.calls_host:
            raise ValueError(
                "norm must be written in JAX, got a norm that runs code on the host: if this code "
                "failed, dpjax could not report the pair on which it failed"
            )
        if [leaf.shape for leaf in norm_program.outputs.leaves] != [()]:
            raise ValueError(f"norm must return one scalar, got {norm_program.outputs}")
        programs = target_program, oracle_program, norm_program
        pair = cls(*programs, positions, released, shape=shape, in_range=in_range)
        # A shortcut computes the result of `finish`. With a `NoiseShape`, the target multiplies
        # this result by A^-1, so a shortcut would not compute the target's value.
        return pair if shape else pair._with_shortcuts(key, target, oracle, database)

    def _with_shortcuts(
        self, key: Key, target: Target, oracle: Oracle, database: Database
    ) -> "RandomPair":
        """Adds shortcuts: ways to compute distances without evaluating two whole databases."""
        # A target that runs on the host needs whole databases, so it has no shortcut.
        if not isinstance(target, Summable) or self.target.calls_host:
            return self
        if not (self.target.is_concrete and self.oracle.is_concrete):
            return self._traced_shortcuts(key, target, oracle, database)
        # Shortcuts are cached by program, not by function, because a program contains the values
        # that its function closed over when it was traced. So equal programs have equal shortcuts.
        kept = _kept_shortcuts(self.target, self.oracle, isinstance(oracle, IndependentRecords))
        if not kept:
            kept.append(self._traced_shortcuts(key, target, oracle, database))
        return dataclasses.replace(self, sums=kept[0].sums, two_records=kept[0].two_records)

    def _traced_shortcuts(
        self, key: Key, target: Summable, oracle: Oracle, database: Database
    ) -> "RandomPair":
        sums = SumOfRecords.trace(target, database)
        # The sums over D and over D' share the statistics of the n - 1 records that do not change.
        # This would be wrong if the statistic of one record depended on other records under `vmap`.
        if touching(sums.statistic.jaxpr):
            return self
        pair = dataclasses.replace(self, sums=sums)
        if not (sums.affine and isinstance(oracle, IndependentRecords)) or self.oracle.calls_host:
            return pair

        # The change of an affine function of the sum depends only on the old and the new record. An
        # oracle of independent records can draw these two records alone, with the same bits as in
        # the whole database.
        def two(key: Key, position: jax.Array) -> tuple[Database, Database]:
            records = oracle.at(key, jnp.stack([position, jnp.full_like(position, self.n)]))
            old, new = (jax.tree.map(lambda leaf, i=i: leaf[i], records) for i in (0, 1))
            return old, new

        drawn = Program.trace("oracle", two, _spec(key), jax.ShapeDtypeStruct((), jnp.int32))
        return dataclasses.replace(pair, two_records=drawn)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Returns the programs of the functions that the caller passed."""
        return self.target, self.oracle, self.norm

    @property
    def is_concrete(self) -> bool:
        """Whether no program has a traced value among its constants."""
        return all(program.is_concrete for program in self.programs)

    @property
    def calls_host(self) -> bool:
        """Whether the target or the oracle runs code on the host."""
        return self.target.calls_host or self.oracle.calls_host

    @property
    def shortcut(self) -> str:
        """Describes in words how distances are computed, because this affects their rounding."""
        if self.two_records is not None:
            return "two records"
        return "two databases" if self.sums is None else "two sums"

    def bytes_of_a_database(self, device: Device | None) -> int:
        """Returns the memory that the target needs for one more database, in bytes."""
        terms = 0
        # The sums over both databases of a pair use the statistics of n + 1 records.
        if self.sums is not None and self.two_records is None:
            terms = (self.n + 1) * _bytes_of(self.sums.statistic, device)
        return max(_bytes_of(self.oracle, device), _bytes_of(self.target, device), terms)

    def bytes_of_a_pair(self, device: Device | None) -> int:
        """Returns the memory that one more pair needs, in bytes."""
        if self.sums is None or self.two_records is None:
            return self.bytes_of_a_database(device)
        return max(_bytes_of(self.two_records, device), _bytes_of(self.sums.statistic, device))

    @property
    def records(self) -> TreeSpec:
        """Returns the structure, shapes and dtypes of a database."""
        return self.target.inputs.argument(0)

    @property
    def n(self) -> int:
        """Returns the number of records of a database."""
        return self.oracle.outputs.leaves[0].shape[0] - 1

    @property
    def positions_sampled(self) -> int:
        """Returns the number of positions that are sampled separately."""
        return self.n if self.positions == "each" else 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the shape of the numbers that `distance` returns for a pair."""
        return ()

    @property
    def distance_dtype(self) -> np.dtype:
        """Returns the float dtype of a distance."""
        return compute_dtype(self.norm.outputs.leaves[0].dtype)

    def distance(
        self, key: Key, index: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the distance of pair `index`, and the rounding step of the target's value.

        `position` is the changed record if positions="each", and ignored otherwise.
        """
        if self.sums is None:
            value, other = self.values(index, *self.databases(key, index, position))
            return self.between(key, index, value, other), self.resolution(value)
        return self.distance_by_sums(key, index, self._changed(key, index, position))

    def between(self, key: Key, index: jax.Array, value: Value, other: Value) -> jax.Array:
        """Returns the distance of pair `index`, given its two values.

        A subclass may return several.
        """
        del key, index
        return distance(self.norm, value, other)

    def databases(
        self, key: Key, index: jax.Array, position: jax.Array
    ) -> tuple[Database, Database]:
        """Returns the two databases of pair `index`."""
        changed = self._changed(key, index, position)
        return neighboring_pair(written(self.records_of(key, index)), changed)

    def values(
        self, index: jax.Array, database: Database, neighbor: Database
    ) -> tuple[Value, Value]:
        """Returns the target's values on the two databases of pair `index`."""
        if self.calls_host or not self.target.has_loops:
            return self._one_by_one(index, database, neighbor)
        # A GPU starts kernels at every step of a loop, so one loop computes the values of both
        # databases.
        return lax.platform_dependent(
            index, database, neighbor, cpu=self._one_by_one, default=self._together
        )

    def _one_by_one(
        self, index: jax.Array, database: Database, neighbor: Database
    ) -> tuple[Value, Value]:
        value = self.target(database, origin=sampled(Role.DATABASE, index))
        return value, self.target(neighbor, origin=sampled(Role.NEIGHBOR, index))

    def _together(
        self, index: jax.Array, database: Database, neighbor: Database
    ) -> tuple[Value, Value]:
        # Only code on the host needs the index, and this target does not run on the host.
        del index
        both = jax.vmap(self.target)(jax.tree.map(lambda *x: jnp.stack(x), database, neighbor))
        value, other = (jax.tree.map(lambda x, i=i: x[i], both) for i in (0, 1))
        return value, other

    def resolution(self, value: Value) -> jax.Array:
        """Returns the norm of the vector of all coordinates' units in the last place."""
        if self.shape is not None:
            return self.shape.resolution(value)
        return resolution("range" if self.in_range else self.norm, value)

    def _changed(self, key: Key, index: jax.Array, position: jax.Array) -> jax.Array | int:
        if self.positions == "last":
            return self.n - 1
        return position if self.positions == "each" else self.random_position(key, index)

    def distance_by_sums(
        self, key: Key, index: jax.Array, changed: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the distance of pair `index` by a shortcut, and the resolution of the value f(D).

        With `two_records`, f(D) is not computed, so the resolution is not known, and 0 is returned.
        """
        assert self.sums is not None
        if self.two_records is None:
            found, value = self.sums.distance(self.norm, self.records_of(key, index), changed)
            return found, self.resolution(value)
        two, position = self.two_records, jnp.asarray(changed, jnp.int32)
        records = drawn(lambda k, i, at: two(jax.random.fold_in(k, i), at), key, index, position)
        moved = self.sums.distance_of_records(self.norm, *records)
        return moved, jnp.zeros_like(moved)

    def records_of(self, key: Key, index: jax.Array) -> Database:
        """Draws the n + 1 records of a pair."""

        def records(key: Key, index: jax.Array) -> Database:
            return self.oracle(jax.random.fold_in(key, index), origin=sampled(Role.ORACLE, index))

        return drawn(records, key, index)

    def random_position(self, key: Key, index: jax.Array) -> jax.Array:
        """Draws a position for pair `index` uniformly."""
        n = self.n
        return drawn(lambda k, i: jax.random.randint(position_key(k, i), (), 0, n), key, index)


@functools.lru_cache(64)
def _kept_shortcuts(target: Program, oracle: Program, independent: bool) -> list[RandomPair]:
    """Returns the cached list for these programs, which is empty at first.

    The caller adds one pair to an empty list. That pair contains the shortcuts `sums` and
    `two_records` of these programs. Programs compare equal if they compute the same function.
    """
    del target, oracle, independent
    return []


def position_key(key: Key, index: jax.Array) -> Key:
    """Returns a key for everything that is random about a pair except its records."""
    return jax.random.fold_in(jax.random.fold_in(key, _POSITION_DOMAIN), index)


def _bytes_of(program: Program, device: Device | None) -> int:
    on_cpu = platform_of(device) == "cpu"
    return program.largest_array_on_cpu if on_cpu else program.largest_array


def _spec(key: Key) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), key.dtype)


def _traced_oracle(oracle: Oracle, key: Key, n: int) -> Program:
    """Traces the oracle for n + 1 records: n of a database, and one that replaces one of them."""
    try:
        program = Program.trace("oracle", lambda key: oracle(key, n + 1), _spec(key))
    except Exception as error:
        if not _takes_the_key_second(oracle, key, n):
            raise
        raise TypeError(
            "oracle must take the key first, oracle(key, n), got one that takes the number of"
            " records first"
        ) from error
    _check_oracle(program, n)
    return program


def _takes_the_key_second(oracle: Callable[..., Database], key: Key, n: int) -> bool:
    with contextlib.suppress(Exception):
        _check_oracle(Program.trace("oracle", lambda key: oracle(n + 1, key), _spec(key)), n)
        return True
    return False


def _check_oracle(program: Program, n: int) -> None:
    refuse_touching("oracle", program.jaxpr)
    for leaf in program.outputs.leaves:
        if leaf.shape[:1] != (n + 1,):
            raise ValueError(
                "oracle must return arrays whose leading axis is the number of records that it is"
                f" asked for: asked for {n + 1}, got {program.outputs}"
            )
    if not program.uses_input:
        raise ValueError(
            "oracle must use its key, because otherwise every database would be the same. Draw "
            "with jax.random. Numbers from numpy.random become constants when JAX traces the "
            "oracle"
        )


def _check_shape(shape: NoiseShape, key: Key, target: Program) -> None:
    """Refuses a noise shape for values of another structure, or learned from this call's pairs."""
    shape.check_fits(target.outputs.tree())
    if not _checks.is_traced(key) and shape.sampled_with == digest(jax.random.key_data(key)):
        raise ValueError(
            "key must differ from the key that the shape of the noise was sampled with: if the same"
            " pairs determine the shape and the scale of the noise, more than a fraction gamma of"
            " other pairs may exceed the estimate. Split the key"
        )
