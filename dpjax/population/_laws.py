"""The distribution of a private function's releases: exact values, and the density given these."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._open_ledgers import simulating
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Inside, Release
from dpjax._exact._numerics import is_key
from dpjax.random._keys import sampling_key, seeded_key
from dpjax.release._privatize import PrivateFunction

Releases: TypeAlias = Callable[[Key, Database], Release]
"""A private function: `private(key, database)` returns a release."""

OneOrSeveral: TypeAlias = Releases | Sequence[Releases]

# A test draws noisy numbers this many times. Each time, the private function must return exactly
# these numbers.
_PROBES = 3
_DERIVED = ("arrays", "rounding", "unit")  # Public facts that the other public facts determine.
_CLOSE = 1e-3  # Public facts count as equal if their relative difference is smaller.
# The errors that JAX raises if Python code needs the value of a traced number.
_ASKED_FOR_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class _StoppedError(Exception):
    """Stops a private function before it draws noise, when its exact value is known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Law:
    """The distribution of a private function's releases, for databases of one kind.

    Attributes:
        private: the function.
        plan: how its noise is drawn.
        published: structure, shapes and dtypes of the noisy numbers.
        values: structure, shapes and dtypes of the exact value.
        held: structure, shapes and dtypes of the noisy numbers as a release stores them.
        accuracy: the accuracy of the function's releases. A release that a user passes must have
            the same public facts as this accuracy, such as bounds, scale and number of records.
    """

    private: Releases
    plan: Inside
    published: TreeSpec
    values: TreeSpec
    held: TreeSpec
    accuracy: Accuracy

    @classmethod
    def of(
        cls, private: Releases, key: Any, database: Callable[..., Database], *given: PyTree
    ) -> "Law":
        """Finds the distribution of the releases on databases that `database` draws.

        Args:
            private: the function.
            key: the shape of a key for noise.
            database: draws a database, from arguments of the shapes `given`.
            given: shapes and dtypes.
        """
        found: list[tuple[Inside, TreeSpec, Accuracy]] = []

        def released(key: Key, *arguments: PyTree) -> Value:
            records, accuracy = database(*arguments), UNKNOWN
            plan, value = _simulated(private, records)
            if isinstance(private, PrivateFunction):
                with simulating(lambda plan, value: plan.mechanism.unpaid_draw(key, value)):
                    made = private(key, records).accuracy
                accuracy = Accuracy(made.kind, made.public)
            found.append((plan, TreeSpec.of(value), accuracy))
            return _drawn(plan, key, value)

        published = TreeSpec.of(jax.eval_shape(released, key, *given))
        plan, values, accuracy = found[-1]
        law = cls(private, plan, published, values, published, accuracy)
        if isinstance(private, PrivateFunction):
            return law
        return law._as_held(_example(database, given))

    @property
    def name(self) -> str:
        """Returns the name of the private function."""
        inner = self.private
        while isinstance(inner, functools.partial):
            inner = inner.func
        if isinstance(inner, PrivateFunction):
            return inner._name
        return getattr(inner, "__name__", type(inner).__name__)

    def exact(self, database: Database) -> Value:
        """Returns the exact value before noise, computed in JAX as in a release."""
        return _simulated(self.private, database)[1]

    def draw(self, key: Key, value: Value) -> Value:
        """Draws the noisy numbers of a release in JAX, without paying from a ledger."""
        return _drawn(self.plan, key, value)

    def log_prob(self, released: Value, value: Value) -> jax.Array:
        """Returns the log density of noisy numbers given the exact value, up to a constant."""
        # The scale of the noise depends only on shapes, so it is computed at compile time.
        with jax.ensure_compile_time_eval():
            return self.plan.mechanism.log_prob(self.plan.read(released), value)

    def read(self, name: str, release: Release | Value) -> Value:
        """Returns the noisy numbers of a release. Refuses a release of another structure."""
        held = release
        if isinstance(release, Release):
            self._check_made_alike(name, release.accuracy)
            held = _numbers_in(release)
        # Numbers may be given as they were drawn (`published`), or as releases store them (`held`).
        wanted = self.published
        if jax.tree.map(np.shape, held) != jax.tree.map(np.shape, wanted.tree()):
            wanted = self.held
        if jax.tree.structure(held) != wanted.structure:
            raise ValueError(_unlike(name, wanted, held))

        def converted(leaf: Value, like: jax.ShapeDtypeStruct) -> jax.Array:
            array = _checks.host_numbers(name, leaf)
            if array.shape != like.shape or not fits(array, like.dtype):
                raise ValueError(_unlike(name, wanted, held))
            if np.isnan(array).any():
                raise ValueError(
                    f"{name} must not be NaN: NaN marks a release whose mechanism had an invalid "
                    "parameter"
                )
            return jnp.asarray(array.astype(like.dtype))

        return self._as_drawn(jax.tree.map(converted, held, wanted.tree()))

    def _as_drawn(self, held: Value) -> Value:
        """Converts numbers from the structure of a stored release to the structure of the draw."""
        wanted = self.published
        leaves = zip(jax.tree.leaves(_in_order(held, wanted)), wanted.leaves, strict=True)
        return jax.tree.unflatten(wanted.structure, [x.reshape(like.shape) for x, like in leaves])

    def _as_held(self, database: Database) -> "Law":
        """Returns this law with the structure in which releases store their noisy numbers.

        Raises an error if releases do not store them. If a function of dpjax computes a statistic
        from noisy numbers, its releases also store the noisy numbers. For any other function, the
        noisy numbers must be the value of the release. To check this, the function is run with
        arbitrary numbers in place of the noisy ones, and must return these numbers unchanged.
        """
        release = self._run(database, None)
        numbers = _numbers_in(release)
        ordered = jax.tree.leaves(_in_order(numbers, self.published))
        sizes = [getattr(x, "size", None) for x in ordered]
        if sizes != [x.size for x in self.published.leaves]:
            raise TypeError(_lost(self.name))
        law = dataclasses.replace(self, held=TreeSpec.of(numbers), accuracy=release.accuracy)
        if release.accuracy.measured is not None:
            return law
        noisy = jax.eval_shape(
            lambda value: self.plan.mechanism.unpaid_draw(seeded_key(0), value), self.values.tree()
        )
        for seed in range(_PROBES):
            given = jax.tree.map(functools.partial(_any_numbers, seed), noisy)
            kept = law._as_drawn(jax.tree.map(np.asarray, self._run(database, given).value))
            handed = given if self.plan.published is None else self.plan.published(given)
            if not jax.tree.all(jax.tree.map(np.array_equal, kept, handed)):
                raise TypeError(_lost(self.name))
        return law

    def _run(self, database: Database, given: Value | None) -> Release:
        """Makes a release about a simulated database.

        If `given` is not None, it takes the place of the noisy numbers.
        """
        draws: list[Inside] = []

        def draw(plan: Inside, value: Value) -> Value:
            draws.append(plan)
            if given is None:
                return plan.mechanism.unpaid_draw(seeded_key(0), value)
            return given

        with simulating(draw):
            release = self.private(seeded_key(0), database)
        if len(draws) != 1 or not isinstance(release, Release):
            raise TypeError(
                f"private must draw one release, but {self.name} draws {len(draws)}, and its result"
                f" is {_checks.shown(release)}: pass one function for each release, or use"
                " dpjax.confidence_set"
            )
        return release

    def _check_made_alike(self, name: str, accuracy: Accuracy) -> None:
        """Refuses a release whose public parameters differ from those of the private function."""
        if accuracy.kind == "" or self.accuracy.kind == "":
            return
        if accuracy.kind != self.accuracy.kind:
            raise ValueError(
                f"{name} must be a release of {self.name}, of the kind {self.accuracy.kind!r}, got"
                f" the kind {accuracy.kind!r}"
            )
        here, there = ({**x.facts, **_public_n(x)} for x in (self.accuracy, accuracy))
        # Facts that the caller chose are compared first, because the error message names the first
        # difference.
        for fact in sorted({*here, *there}, key=lambda fact: (fact in _DERIVED, fact)):
            if not _alike(here.get(fact), there.get(fact)):
                raise ValueError(
                    f"{name} must match the simulated releases of {self.name}, which have"
                    f" {fact}={json.dumps(here.get(fact)):.100}, got"
                    f" {fact}={json.dumps(there.get(fact)):.100}: pass the private function, n and"
                    " capacity that made the release"
                )


def _simulated(private: Releases, database: Database) -> tuple[Inside, Value]:
    """Runs a function up to its noise. Returns how it draws the noise, and the exact value."""
    found: list[tuple[Inside, Value]] = []

    def stop(plan: Inside, value: Value) -> Value:
        found.append((plan, value))
        raise _StoppedError

    with jax.ensure_compile_time_eval():
        key = seeded_key(0)
    try:
        with simulating(stop):
            private(key, database)
    except _StoppedError:
        return found[0]
    except _ASKED_FOR_NUMBERS as error:
        raise TypeError(
            "private must be made by dpjax.privatize, or be JAX code that can run on many "
            f"simulated databases at once, but {_checks.shown(private)} reads the values of traced "
            "arrays: use dpjax.confidence_set, or write the target with jax.numpy"
        ) from error
    raise TypeError(
        "private must be a function that makes its release by dpjax.privatize or a private "
        f"statistic of dpjax, but {_checks.shown(private)} draws no noise"
    )


def _example(database: Callable[..., Database], given: Sequence[PyTree]) -> Database:
    """Draws a database for tests. The values of its numbers do not matter."""

    def made() -> Database:
        key = sampling_key(seeded_key(1))
        return database(
            *jax.tree.map(lambda x: key if is_key(x) else jnp.ones(x.shape, x.dtype), given)
        )

    return jax.jit(made)()


def _drawn(plan: Inside, key: Key, value: Value) -> Value:
    noisy = plan.mechanism.unpaid_draw(key, value)
    return noisy if plan.published is None else plan.published(noisy)


def _numbers_in(release: Release) -> Value:
    """Returns the noisy numbers of a release.

    Some releases store them in `accuracy.measured`. For other releases, they are the value.
    """
    measured = release.accuracy.measured
    if measured is None:
        return release.value
    return measured.get("sums", measured)


def _in_order(held: Value, published: TreeSpec) -> Value:
    """Puts numbers that a release stores by name into the order of the draw's fields."""
    fields = getattr(published.tree(), "_fields", None)
    return [held[field] for field in fields] if fields and isinstance(held, dict) else held


def _any_numbers(seed: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns random numbers of both signs and of many magnitudes."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(like.dtype, jnp.bool_):
        return jnp.asarray(rng.integers(0, 2, like.shape).astype(bool))
    if jnp.issubdtype(like.dtype, jnp.integer):
        limits = jnp.iinfo(like.dtype)
        return jnp.asarray(rng.integers(limits.min + 1, limits.max, like.shape, like.dtype))
    sizes = 10.0 ** rng.integers(-3, 7, like.shape)
    return jnp.asarray(rng.normal(size=like.shape) * sizes, like.dtype)


def _public_n(accuracy: Accuracy) -> dict[str, Any]:
    """Returns the number of records if it is public."""
    measured = accuracy.measured
    n = measured.get("n") if isinstance(measured, dict) else None
    return {} if n is None else {"n": np.asarray(n).tolist()}


def _alike(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, up to the rounding of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[x], other[x]) for x in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_CLOSE)
    return one == other


def _lost(name: str) -> str:
    return (
        f"private must return the numbers that were drawn, but the value of {name} is computed from"
        " them, and the release does not keep them: pass the function that draws the numbers, and"
        " its release, or use dpjax.confidence_set"
    )


def fits(array: np.ndarray, dtype: Any) -> bool:
    """Whether numbers fit a dtype. Integer dtypes accept only whole numbers in range."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return True
    ends = jnp.iinfo(dtype)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    return bool(np.all((array >= ends.min) & (array <= ends.max) & (array == np.round(array))))


def check_distinct(privates: Sequence[Releases], releases: Sequence[Any]) -> None:
    """Refuses a release that is given twice, because it would count twice.

    A ledger may return a stored release again.
    """
    for i, j in itertools.combinations(range(len(releases)), 2):
        one, other = releases[i], releases[j]
        both = isinstance(one, Release) and isinstance(other, Release)
        if not both or not _is_same_function(privates[i], privates[j]):
            continue
        numbers = [_numbers_in(x) for x in (one, other)]
        alike = jax.tree.structure(numbers[0]) == jax.tree.structure(numbers[1])
        if one is other or (alike and jax.tree.all(jax.tree.map(np.array_equal, *numbers))):
            raise ValueError(
                f"release[{i}] and release[{j}] have equal numbers, but must be two draws of noise."
                " If a ledger returned the same release again, pass it once. If the noise was drawn"
                " twice, pass release.value of each"
            )


def _is_same_function(one: Releases, other: Releases) -> bool:
    if isinstance(one, PrivateFunction) and isinstance(other, PrivateFunction):
        return one.target is other.target and one.mechanism is other.mechanism
    return one is other


def _unlike(name: str, wanted: TreeSpec, value: Value) -> str:
    return (
        f"{name} must be like the private function's releases about databases of the model,"
        f" {wanted}, got {_checks.described(value)}"
    )


def as_several(private: OneOrSeveral) -> tuple[Releases, ...]:
    """Returns a tuple of private functions, whether one or several are given."""
    several: tuple[Any, ...] = tuple(private) if isinstance(private, (list, tuple)) else (private,)
    for one in several:
        if not _takes_key_and_database(one):
            raise TypeError(
                "private must be made by dpjax.privatize(target, mechanism), or be a function of a"
                f" key and a database that releases a private statistic, got {_checks.shown(one)}"
            )
    if not several:
        raise ValueError("private must contain at least one private function, got none")
    return several


def _takes_key_and_database(private: Any) -> bool:
    try:
        inspect.signature(private).bind("key", "database")
    except TypeError:
        return False
    except ValueError:  # Some functions that are written in C have no signature.
        return True
    return True
