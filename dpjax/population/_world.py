"""Populations, their databases, and the joint law of releases about one database."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._tracing._programs import needs_no_values
from dpjax.population._laws import Law, OneOrSeveral, as_several
from dpjax.population._model import Model, NumberOfRecords, Population
from dpjax.random._keys import sampling_key, seeded_key


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
        """Checks the caller's arguments; `key` is an example of the keys that will be used."""
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
        """A theta, and the exact values on a database of its population. It runs in JAX."""
        key_theta, key_database = jax.random.split(key)
        theta = _checks.real_arrays("theta", self.prior(key_theta))
        database = self.population.database(key_database, theta)
        return {"theta": theta, "values": tuple(law.exact(database) for law in self.laws)}

    def draw_release(self, key: Key, theta: PyTree) -> Value:
        """Draws releases about one simulated database. It runs in JAX, and no ledger pays."""
        keys = jax.random.split(key, len(self.laws) + 1)
        database = self.population.database(sampling_key(keys[0]), theta)
        drawn = tuple(
            law.draw(one, law.exact(database)) for law, one in zip(self.laws, keys[1:], strict=True)
        )
        return drawn[0] if self.is_single else drawn

    def log_prob(self, released: tuple[Value, ...], values: tuple[Value, ...]) -> jax.Array:
        """The log density of the releases, up to a constant, given the exact values."""
        given = zip(self.laws, released, values, strict=True)
        logs = [law.log_prob(output, value) for law, output, value in given]
        dtype = jnp.result_type(float)
        return functools.reduce(jnp.add, (log.astype(dtype) for log in logs))

    def read(self, release: Any) -> tuple[Value, ...]:
        """The arrays of the releases. Refuses releases that the private functions cannot make."""
        if self.is_single:
            return (self.laws[0].read("release", release),)
        given = list(release) if isinstance(release, (list, tuple)) else [release]
        if len(given) != len(self.laws):
            raise ValueError(
                f"release must be a list of {len(self.laws)}, with one release of each private"
                f" function, got {len(given)}"
            )
        read = zip(self.laws, given, strict=True)
        return tuple(law.read(f"release[{i}]", one) for i, (law, one) in enumerate(read))
