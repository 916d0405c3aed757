"""Random pairs of neighboring databases, and how far the target moves on each."""

import contextlib
import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._fingerprints import digest
from dpjax._lanes import refuse_touching, touching
from dpjax._numerics import compute_dtype
from dpjax._origins import Role, sampled
from dpjax._programs import Program
from dpjax._pytree import TreeSpec
from dpjax._shaped_norm import NoiseShape
from dpjax._sum_targets import Summable
from dpjax.base import Norm, Oracle, Positions, Target
from dpjax.neighbors import neighboring_pair
from dpjax.norms import difference, distance, norm_function, resolution
from dpjax.oracles._independent import IndependentRecords
from dpjax.sensitivity._sums import SumOfRecords

# Pair i uses fold_in(key, i); the last index derives the random positions.
MOST_SAMPLED_PAIRS = 2**32 - 1
_MOST_RECORDS = 2**31 - 2
_POSITION_DOMAIN, _ROTATION = 2**32 - 1, 1


@dataclasses.dataclass(frozen=True)
class RandomPair:
    """One pair of neighboring databases and the distance of the target's values on it.

    Hashable by the fingerprints of its programs, so it can be a static argument of `jit`.

    Attributes:
        target: takes n records; where the norm has a shape, to the value as that maps it.
        oracle: takes a key to n + 1 records.
        norm: takes the difference of two values.
        positions: "last", "average" or "each".
        sums: the target in two parts, if it is a function of a sum over records.
        two_records: takes a key and a position to that record of the oracle and the spare one, if
            the oracle says that records are independent, and nothing else is needed.
        shape: of the noise, where the norm has one.
        unmapped: the target itself, where the norm has a shape.
    """

    target: Program
    oracle: Program
    norm: Program
    positions: Positions
    sums: SumOfRecords | None = None
    two_records: Program | None = None
    shape: NoiseShape | None = None
    unmapped: Program | None = None

    @classmethod
    def trace(
        cls,
        key: jax.Array,
        target: Target,
        oracle: Oracle,
        *,
        n: int,
        norm: Norm,
        positions: Positions,
    ) -> "RandomPair":
        """Traces target and oracle at n records, and refuses what cannot be sampled."""
        _checks.function("target", target)
        _checks.function("oracle", oracle)
        norm_of = norm_function(norm)
        _checks.choice("positions", positions, get_args(Positions))
        n = _checks.integer("n", n, least=1, most=_MOST_RECORDS)
        key_spec = jax.ShapeDtypeStruct((), key.dtype)
        oracle_program = _trace_oracle(oracle, key_spec, n + 1)
        _check_oracle(oracle_program, n)
        database, _ = jax.eval_shape(neighboring_pair, oracle_program.outputs.tree())
        target_program = Program.trace("target", target, database)
        shape = unmapped = None
        if isinstance(norm, NoiseShape):
            _check_shape(norm, key, target_program)
            shape, unmapped = norm, target_program
            # Distances are those of what gets noise, as it is computed.
            target = functools.partial(_mapped_value, target, norm)
            target_program, norm_of = Program.trace("target", target, database), norm_function("l2")
        value = target_program.outputs.tree()
        norm_program = Program.trace("norm", norm_of, jax.eval_shape(difference, value, value))
        _check_norm(norm_program)
        # What runs on the host has to be told of every database: no shortcut for it. Nor where what
        # a record adds may depend on others.
        sums = None
        if isinstance(target, Summable) and not target_program.calls_host:
            traced = SumOfRecords.trace(target, database)
            sums = None if touching(traced.statistic.jaxpr) else traced
        two_records = None
        only_two = sums is not None and sums.affine and not oracle_program.calls_host
        if only_two and isinstance(oracle, IndependentRecords):
            two = functools.partial(_two_records, oracle, n)
            two_records = Program.trace(
                "oracle", two, key_spec, jax.ShapeDtypeStruct((), jnp.int32)
            )
        programs = target_program, oracle_program, norm_program
        return cls(*programs, positions, sums, two_records, shape, unmapped)

    @property
    def programs(self) -> tuple[Program, ...]:
        """What the caller has given."""
        return self.target, self.oracle, self.norm

    @property
    def released(self) -> Program:
        """The target as it is called for a release."""
        return self.target if self.unmapped is None else self.unmapped

    @property
    def is_concrete(self) -> bool:
        """Whether every constant is known."""
        return all(program.is_concrete for program in self.programs)

    @property
    def calls_host(self) -> bool:
        """Whether the target or the oracle runs code on the host."""
        return self.target.calls_host or self.oracle.calls_host

    @property
    def shortcut(self) -> str:
        """How distances are computed: another way has other roundings."""
        if self.two_records is not None:
            return "two records"
        return "two databases" if self.sums is None else "two sums"

    @property
    def bytes_of_a_database(self) -> int:
        """What evaluating the target on one more database adds to memory."""
        return max(self.oracle.largest_array(), self.target.largest_array())

    @property
    def bytes_of_a_pair(self) -> int:
        """What one more pair adds to memory."""
        if self.sums is None or self.two_records is None:
            return self.bytes_of_a_database
        return max(self.two_records.largest_array(), self.sums.statistic.largest_array())

    @property
    def records(self) -> TreeSpec:
        """Structure, shapes and dtypes of a database."""
        return self.target.inputs.argument(0)

    @property
    def n(self) -> int:
        """Records of a database."""
        return self.oracle.outputs.leaves[0].shape[0] - 1

    @property
    def positions_sampled(self) -> int:
        """Positions that are sampled separately."""
        return self.n if self.positions == "each" else 1

    @property
    def distance_dtype(self) -> Any:
        """The float dtype of a distance."""
        return compute_dtype(self.norm.outputs.leaves[0].dtype)

    def distance(
        self, key: jax.Array, index: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The distance on pair `index`, and the resolution of the target's value there.

        `position` is the changed record where positions="each", and ignored otherwise.
        """
        if self.sums is None:
            value, other = self.values(key, index, position)
            return distance(self.norm, value, other), self.resolution(value)
        changed = self._changed(key, index, position)
        return self._distance_of_sums(self.sums, key, index, changed)

    def values(self, key: jax.Array, index: jax.Array, position: jax.Array) -> tuple[Any, Any]:
        """The target's values on the two databases of pair `index`."""
        changed = self._changed(key, index, position)
        database, neighbor = neighboring_pair(self.records_of(key, index), changed)
        value = self.target(database, origin=sampled(Role.DATABASE, index))
        return value, self.target(neighbor, origin=sampled(Role.NEIGHBOR, index))

    def resolution(self, value: Any) -> jax.Array:
        """The norm of a unit in the last place of every coordinate of the target's value."""
        return resolution(self.norm, value) if self.shape is None else self.shape.resolution(value)

    def _changed(self, key: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array | int:
        return {
            "last": lambda: self.n - 1,
            "average": lambda: self.random_position(key, index),
            "each": lambda: position,
        }[self.positions]()

    def _distance_of_sums(
        self, sums: SumOfRecords, key: jax.Array, index: jax.Array, changed: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """The same by the shortcut; where only two records matter, resolution is left to probes."""
        if self.two_records is None:
            return sums.distance(self.norm, self.records_of(key, index), changed)
        records = self.two_records(jax.random.fold_in(key, index), jnp.asarray(changed, jnp.int32))
        moved = sums.distance_of_records(self.norm, *records)
        return moved, jnp.zeros_like(moved)

    def records_of(self, key: jax.Array, index: jax.Array) -> Any:
        """The n + 1 records of a pair."""
        return self.oracle(jax.random.fold_in(key, index), origin=sampled(Role.ORACLE, index))

    def distance_by_sums(self, key: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        """The distance where this record of pair `index` is replaced, by the shortcut."""
        assert self.sums is not None
        return self._distance_of_sums(self.sums, key, index, position)[0]

    def random_position(self, key: jax.Array, index: jax.Array) -> jax.Array:
        """A position for pair `index`, drawn uniformly."""
        return jax.random.randint(_position_key(key, index), (), 0, self.n)

    def random_rotation(self, key: jax.Array, index: jax.Array) -> jax.Array:
        """By how many places to move the records of pair `index`: uniform, and never by none."""
        rotation_key = jax.random.fold_in(_position_key(key, index), _ROTATION)
        return jax.random.randint(rotation_key, (), 1, max(self.n, 2))


def _position_key(key: jax.Array, index: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, _POSITION_DOMAIN), index)


def _trace_oracle(oracle: Oracle, key: jax.ShapeDtypeStruct, n: int) -> Program:
    try:
        return Program.trace("oracle", lambda key: oracle(key, n), key)
    except Exception as error:
        if _takes_the_key_second(oracle, key, n):
            raise TypeError(
                "oracle must take the key first, oracle(key, n), but takes the number of records"
                " first"
            ) from error
        raise


def _takes_the_key_second(oracle: Any, key: jax.ShapeDtypeStruct, n: int) -> bool:
    with contextlib.suppress(Exception):
        _check_oracle(Program.trace("oracle", lambda key: oracle(n, key), key), n - 1)
        return True
    return False


def _two_records(
    oracle: IndependentRecords, n: int, key: jax.Array, position: jax.Array
) -> tuple[Any, Any]:
    records = oracle.at(key, jnp.stack([position, jnp.full_like(position, n)]))
    return jax.tree.map(lambda leaf: leaf[0], records), jax.tree.map(lambda leaf: leaf[1], records)


def _mapped_value(target: Target, shape: NoiseShape, database: Any) -> jax.Array:
    return shape.mapped(target(database))


def _check_shape(shape: NoiseShape, key: jax.Array, target: Program) -> None:
    """Refuses a shape of another value, and one that knows the pairs which are to be drawn."""
    shape.check_fits(target.outputs.tree())
    if not _checks.is_traced(key) and shape.sampled_with == digest(jax.random.key_data(key)):
        raise ValueError(
            "key must be another than the one that the shape of the noise was sampled with: noise"
            " that fits the very pairs that its scale is taken from covers fewer others than gamma"
            " says"
        )


def _check_norm(norm: Program) -> None:
    refuse_touching("norm", norm.jaxpr)
    if norm.calls_host:
        raise ValueError("norm must be JAX code: it cannot say which pair it failed on")
    if [leaf.shape for leaf in norm.outputs.leaves] != [()]:
        raise ValueError(f"norm must return one scalar, got {norm.outputs}")


def _check_oracle(oracle: Program, n: int) -> None:
    refuse_touching("oracle", oracle.jaxpr)
    for leaf in oracle.outputs.leaves:
        if leaf.shape[:1] != (n + 1,):
            raise ValueError(
                "oracle must return arrays whose leading axis is the number of records that it is"
                f" asked for: asked for {n + 1}, got {oracle.outputs}"
            )
    if not oracle.uses_input():
        raise ValueError(
            "oracle does not use its key: every database would be the same. Draw with jax.random,"
            " not with numpy.random, whose numbers are fixed when JAX traces the oracle"
        )
