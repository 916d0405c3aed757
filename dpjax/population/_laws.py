"""The law of a release: the exact value on a database, and the density of the release given it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Inside, Release
from dpjax.release._privatize import PrivateFunction

OneOrSeveral: TypeAlias = PrivateFunction | Sequence[PrivateFunction]


@dataclasses.dataclass(frozen=True, eq=False)
class Law:
    """The distribution of a private function's releases, for databases of one structure.

    Attributes:
        private: the private function.
        plan: its compiled target, and the draw of its noise.
        published: structure, shapes and dtypes of the value of a release.
    """

    private: PrivateFunction
    plan: Inside
    published: TreeSpec

    @classmethod
    def of(
        cls, private: PrivateFunction, key: Any, database: Callable[..., Database], *given: PyTree
    ) -> "Law":
        """Reads the structure of the databases. Refuses those that the function does not accept.

        Args:
            private: the private function.
            key: the shape of a key for noise.
            database: draws a database, from arguments with the shapes `given`.
            given: shapes and dtypes of the arguments.
        """
        found: list[Inside] = []

        def released(key: Key, *arguments: PyTree) -> Value:
            records, kind = private._read(database(*arguments))
            found.append(kind.plan)
            return _drawn(kind.plan, key, private._traced(kind)(records))

        outputs = jax.eval_shape(released, key, *given)
        return cls(private, found[-1], TreeSpec.of(outputs))

    def exact(self, database: Database) -> Value:
        """The exact value before noise, computed as in a release. It runs in JAX."""
        records, kind = self.private._read(database)
        return self.private._traced(kind)(records)

    def draw(self, key: Key, value: Value) -> Value:
        """The value of a release. It runs in JAX, and no ledger pays for it."""
        return _drawn(self.plan, key, value)

    def log_prob(self, released: Value, value: Value) -> jax.Array:
        """The log density of a release, up to a constant, given the exact value."""
        with jax.ensure_compile_time_eval():  # Shapes alone determine the scale of the noise.
            return self.plan.mechanism.log_prob(self.plan.read(released), value)

    def read(self, name: str, release: Release | Value) -> Value:
        """The arrays of a release. Refuses a release of another structure."""
        value = release.value if isinstance(release, Release) else release
        wanted = self.published.tree()
        if jax.tree.structure(value) != self.published.structure:
            raise ValueError(_unlike(name, self.published, value))

        def converted(leaf: Value, like: jax.ShapeDtypeStruct) -> jax.Array:
            array = _checks.host_numbers(name, leaf)
            whole = np.issubdtype(array.dtype, np.integer) or bool(np.all(array == np.round(array)))
            if array.shape != like.shape or (jnp.issubdtype(like.dtype, jnp.integer) and not whole):
                raise ValueError(_unlike(name, self.published, value))
            if np.isnan(array).any():
                raise ValueError(f"{name} is NaN: a parameter of its mechanism was bad")
            return jnp.asarray(array.astype(like.dtype))

        return jax.tree.map(converted, value, wanted)


def _drawn(plan: Inside, key: Key, value: Value) -> Value:
    noisy = plan.mechanism.unpaid_draw(key, value)
    return noisy if plan.published is None else plan.published(noisy)


def _unlike(name: str, wanted: TreeSpec, value: Value) -> str:
    return (
        f"{name} must be like the private function's releases about databases of the model,"
        f" {wanted}, got {_checks.described(value)}"
    )


def as_several(private: OneOrSeveral) -> tuple[PrivateFunction, ...]:
    """The private functions, one or several."""
    several: tuple[Any, ...] = tuple(private) if isinstance(private, (list, tuple)) else (private,)
    for one in several:
        if not isinstance(one, PrivateFunction):
            raise TypeError(
                "private must be made by dpjax.privatize(target, mechanism), whose releases have a"
                f" known density, got {_checks.shown(one)}: for other private functions use"
                " dpjax.confidence_set"
            )
    if not several:
        raise ValueError("private must hold at least one private function, got none")
    return several
