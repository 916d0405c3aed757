"""Public models of a population, a database of it, and releases about this database."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import scipy

from dpjax._core import _checks
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._tracing._programs import needs_no_values
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.population._laws import Law, OneOrSeveral, as_several, check_distinct
from dpjax.random._keys import sampling_key, seeded_key

_RARE = 1e-6


Model: TypeAlias = Callable[[Key, PyTree, int], Database]
"""Draws n records of a population with parameters theta: `model(key, theta, n)`."""

NumberOfRecords: TypeAlias = int | Callable[[PyTree], Any]
"""The public number of records, or a function of theta that returns the private one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """Draws databases, given the parameters of a population.

    Attributes:
        model: draws records.
        n: the number of records, or a function of theta that computes it.
        capacity: the number of slots of padded records; None for plain arrays.
    """

    model: Model
    n: NumberOfRecords
    capacity: int | None

    @classmethod
    def of(cls, model: Model, n: NumberOfRecords, capacity: int | None) -> "Population":
        """Checks the arguments of the caller, and makes a `Population`."""
        _checks.function("model", model)
        if capacity is not None:
            capacity = _checks.integer("capacity", capacity, least=1)
        if not callable(n):
            n = _checks.integer("n", n, least=1, most=capacity)
        elif capacity is None:
            raise ValueError(
                "capacity must be given, because n is a function of theta: pass the number of"
                " slots of the PaddedRecords from which the release was made"
            )
        return cls(model, n, capacity)

    def database(self, key: Key, theta: PyTree) -> Database:
        """Draws one database in JAX."""
        slots = self.n if self.capacity is None else self.capacity
        assert not callable(slots)
        records = self.model(key, theta, slots)
        leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(records)}
        if leading != {(slots,)}:
            raise ValueError(
                "model must return arrays whose leading axis is the number of records that it is"
                f" asked for: asked for {slots}, got {_checks.described(records)}"
            )
        if self.capacity is None:
            return records
        count = self.n(theta) if callable(self.n) else self.n
        present = jnp.arange(slots) < jnp.round(jnp.asarray(count)).astype(jnp.int32)
        return PaddedRecords(records, present)


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """Simulates parameters theta, a database of their population, and releases about it.

    Attributes:
        laws: for each private function, the law of its releases.
        population: draws databases.
        prior: draws theta.
        is_single: whether one private function was given, instead of a list.
    """

    laws: tuple[Law, ...]
    population: Population
    prior: Callable[[Key], PyTree]
    is_single: bool

    @classmethod
    def of(
        cls,
        key: Key,
        private: OneOrSeveral,
        prior: Callable[[Key], PyTree],
        model: Model,
        n: NumberOfRecords,
        capacity: int | None,
    ) -> "World":
        """Checks the arguments of the caller; `key` is an example of the keys that will be used."""
        privates = as_several(private)
        _checks.function("prior", prior)
        population = Population.of(model, n, capacity)
        spec = jax.ShapeDtypeStruct((), key.dtype)
        with needs_no_values("prior"):
            theta = jax.eval_shape(lambda key: _checks.real_arrays("theta", prior(key)), spec)
        noise_key = jax.ShapeDtypeStruct((), seeded_key(0).dtype)
        with needs_no_values("model"):
            laws = tuple(
                Law.of(one, noise_key, population.database, spec, theta) for one in privates
            )
        return cls(laws, population, prior, not isinstance(private, (list, tuple)))

    def simulated(self, key: Key) -> dict[str, PyTree]:
        """Draws theta, and then a database from the model at theta.

        Returns theta, and the exact values of all private functions. Works inside `jit`.
        """
        key_theta, key_database = jax.random.split(key)
        theta = _checks.real_arrays("theta", self.prior(key_theta))
        database = self.population.database(key_database, theta)
        return {"theta": theta, "values": tuple(law.exact(database) for law in self.laws)}

    def draw_release(self, key: Key, theta: PyTree) -> Value:
        """Draws releases about one simulated database in JAX, without paying from a ledger."""
        keys = jax.random.split(key, len(self.laws) + 1)
        database = self.population.database(sampling_key(keys[0]), theta)
        drawn = tuple(
            law.draw(one, law.exact(database)) for law, one in zip(self.laws, keys[1:], strict=True)
        )
        return drawn[0] if self.is_single else drawn

    def log_prob(self, released: tuple[Value, ...], values: tuple[Value, ...]) -> jax.Array:
        """Returns the log density of the releases given the exact values, up to a constant."""
        given = zip(self.laws, released, values, strict=True)
        return _added(law.log_prob(output, value) for law, output, value in given)

    def check_explained(self, log_density: float) -> None:
        """Refuses releases that the model cannot explain: they are far from all simulated releases.

        `log_density` is the largest log density among simulated databases. Additive noise has a
        log-concave density. In k dimensions, the probability that the log of such a density is at
        least x below its maximum is at most the probability that a Gamma(k) variable exceeds x.
        """
        additive = [isinstance(x.plan.mechanism, CoordinatewiseMechanism) for x in self.laws]
        if not all(additive):
            return
        fall = float(self._largest) - log_density
        numbers = sum(x.size for law in self.laws for x in law.values.leaves)
        if scipy.special.gammaincc(numbers, max(fall, 0.0)) < _RARE:
            raise ValueError(
                "release must be near a simulated one, but it is far from all of them: even for "
                "the nearest simulated database, the probability of such large noise is below "
                f"{_RARE:g}. Use the n and the private function of the release, and a prior and "
                "model that can explain it"
            )

    @functools.cached_property
    def _largest(self) -> jax.Array:
        """Returns the largest log density that additive noise can have: its density at 0."""

        def at_zero(law: Law) -> jax.Array:
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), law.values.tree())
            return law.plan.mechanism.log_prob(zero, zero)

        return _added(map(at_zero, self.laws))

    def read(self, release: Any) -> tuple[Value, ...]:
        """Returns the arrays of the releases.

        Refuses ones that the private functions cannot make.
        """
        if self.is_single:
            return (self.laws[0].read("release", release),)
        given = list(release) if isinstance(release, (list, tuple)) else [release]
        if len(given) != len(self.laws):
            raise ValueError(
                f"release must be a list of {len(self.laws)} releases, one of each private "
                f"function, got {len(given)}"
            )
        check_distinct([law.private for law in self.laws], given)
        read = zip(self.laws, given, strict=True)
        return tuple(law.read(f"release[{i}]", one) for i, (law, one) in enumerate(read))


def _added(logs: Iterable[jax.Array]) -> jax.Array:
    """Returns the sum of log densities, which may have different dtypes."""
    return functools.reduce(jnp.add, (log.astype(jnp.result_type(float)) for log in logs))
