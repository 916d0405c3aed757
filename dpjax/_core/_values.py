"""The main types of dpjax: targets, oracles, sensitivities, mechanisms and operating points."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from dpjax._core._bounds import RecordBounds
from dpjax._core._guarantee import (
    RECORD,
    Guarantee,
    NeighboringRelation,
    describe_confidence,
    per_unit,
    shown_number,
)
from dpjax._core._pytree import TreeSpec, down, frozen_pytree, static, up
from dpjax._core._release import Release
from dpjax._core._types import Database, Key, PyTree, Scalar, Value

Target = Callable[[Database], Value]
"""A pure JAX function of a database: a pytree of arrays with a common leading axis of n records."""


class Oracle(Protocol):
    """A public model of plausible databases: `oracle(key, n)` draws n exchangeable records.

    The result is a pytree of arrays with leading axis n. All the records of a pair of neighboring
    databases come from one call, so dependencies between records, such as a shared latent variable,
    extend to both databases.
    """

    def __call__(self, key: Key, n: int, /) -> Database:
        """Draws a database of n records."""
        ...


Norm = Literal["l1", "l2", "linf", "hamming", "range"] | Callable[[Value], jax.Array]
"""The name of a norm, or a function that maps the difference of two target values, a pytree of
float arrays, to a scalar."""

Positions = Literal["last", "average", "each"]
"""Which record of a pair of databases changes, see `dpjax.sample_sensitivity`."""

Method = Literal["exact", "dkw", "anytime"]
"""How an operating point is computed, see `dpjax.operating_point`."""

NoiseKind = Literal["exact", "float"]
"""Exact integer noise, or float noise for simulations where nothing is published."""


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """The number of pairs to sample, the order statistic to take, and the resulting guarantee.

    Attributes:
        m: number of random pairs of neighboring databases.
        k: the rank, counted from 1, of the distance that becomes the estimate.
        gamma: the probability that a random pair is not covered.
        rho: the free parameter of Theorem 15 for method "dkw"; None for other methods.
        method: "exact", "dkw" or "anytime".
        confidence: the probability over the samples that the statement about gamma is true. None
            for a marginal statement, where gamma is a probability over the samples and a fresh
            pair together.

    Formal guarantees:
        As for `dpjax.operating_point`, which makes operating points.
    """

    m: int
    k: int
    gamma: float
    rho: float | None
    method: str
    confidence: float | None

    def __str__(self) -> str:
        rho = "" if self.rho is None else f", rho={self.rho:.4g}"
        return (
            f"m={self.m}, k={self.k}, gamma={shown_number(self.gamma)}{rho}"
            f" ({self.method}, {describe_confidence(self.confidence)})"
        )


@dataclasses.dataclass(eq=False)
class Proof:
    """The steps of a proof, as text.

    All proofs compare as equal, so that JAX's caches ignore them.

    Attributes:
        steps: one line of text for each step.
        losses: a function that measures how much each step loosens the bound. It returns the lines
            with these factors. After its first call, this is None.
        summary: a text that `repr` shows, too; "" if there is none. For a proved sensitivity, it
            compares the bound with the distance of the results on two concrete databases. For a
            sampled sensitivity, it states which bound can be proved.
    """

    steps: tuple[str, ...]
    losses: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None
    summary: str = ""

    def explained(self) -> str:
        """Returns the steps as text. Each line says by which factor its step loosens the bound.

        The first call measures these factors, and stores the lines.
        """
        if self.losses is not None:
            self.steps, self.losses = self.losses(self.steps), None
        return "\n".join((*self.steps, self.summary) if self.summary else self.steps)

    def __getstate__(self) -> dict[str, object]:
        """Drops `losses`, because the program in it cannot be pickled."""
        return {"steps": self.steps, "losses": None, "summary": self.summary}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proof)

    def __hash__(self) -> int:
        return hash(Proof)


@frozen_pytree
class Sensitivity:
    """How much the target's value changes when one record changes: sampled, or a known bound.

    Made by `dpjax.sample_sensitivity` or `dpjax.assume_sensitivity`, never by hand.

    Attributes:
        value: the estimate, or the bound, in the units of the target's output.
        gamma: the probability that the distance of a random pair exceeds `value`.
        confidence: the probability over the samples that the statement about gamma is true; None
            if the statement is marginal.
        norm: the norm in which distances between outputs were measured.
        n: number of records of a database; None if the bound is valid for any number.
        relation: which databases are neighbors.
        m: number of pairs sampled; None for a bound.
        k: the rank of the selected distance; None for a bound.
        method: "exact", "dkw" or "anytime" for a sample; "assumed", "known" or "proved" for a
            bound.
        positions: which record of a pair was changed: "last", "average" or "each".
        chunk_size: pairs in a chunk; distances are reproducible for one chunk size and backend.
        deciding_records: the number of independently drawn records that determine the distance of a
            pair; None if all records of the pair may matter.
        zero_allowed: whether a value of 0, and so a release without noise, was explicitly allowed.
        identity: a hash of the sampling: key, target, oracle, norm and operating point; None for a
            bound.
        target: fingerprint of the traced target; None for a bound.
        records: structure, shapes and dtypes of a database; None for a bound.
        outputs: structure, shapes and dtypes of the target's value; None for a bound.
        distance: fingerprint of the traced norm; None for a bound, and for a norm that has a name.
        bounds: if the bound was proved for clamped records, the clamp that a release applies to the
            database first. Then `target` is the fingerprint of the clamp and the target together.
        proof: the steps of the proof, if there is one; for a sampled sensitivity, its exact sums,
            and a line that says which bound can be proved.
        known_by: the type of the query or target whose method `sensitivity` made this object; None
            if it was made in another way. If it is set, a release requires a target that knows its
            own sensitivity.
        inside: whether `value` bounds the integers that `dpjax.privatize` computes internally,
            rather than the floats that the target returns.
        privacy_unit: whose data neighboring databases differ in, as in `Guarantee`.
        notes: other facts about the target that a guarantee must mention, such as "at most 4 rows
            each".

    Formal guarantees:
        With probability at least `confidence` over the samples, the distance of a random pair of
        neighboring databases exceeds `value` with probability at most `gamma`. If `confidence` is
        None, the distance exceeds `value` with probability at most `gamma` over the samples and the
        pair together. A bound has gamma 0 and confidence 1.
    """

    value: Scalar
    gamma: Scalar = up()
    confidence: Scalar | None = down()
    norm: Norm = static()
    n: int | None = static()
    relation: NeighboringRelation = static(default=NeighboringRelation.REPLACE_ONE)
    m: int | None = static(default=None)
    k: int | None = static(default=None)
    method: str = static(default="assumed")
    positions: Positions = static(default="last")
    chunk_size: int | None = static(default=None)
    zero_allowed: bool = static(default=False)
    deciding_records: int | None = static(default=None)
    identity: str | None = static(default=None)
    target: str | None = static(default=None)
    records: TreeSpec | None = static(default=None)
    outputs: TreeSpec | None = static(default=None)
    distance: str | None = static(default=None)
    bounds: RecordBounds | None = static(default=None)
    proof: Proof | None = static(default=None)
    known_by: str | None = static(default=None)
    inside: bool = static(default=False)
    privacy_unit: str = static(default=RECORD)
    notes: tuple[str, ...] = static(default=())

    def explain(self) -> str:
        """The proof as text: a bound for every operation of the target's program.

        Returns:
            One line for each operation, indented for operations of inner functions. To measure how
            tight the bounds are, the program also runs on random pairs of neighbors. If an
            operation loosens the bound, its line gives the factor and a remedy. For a sampled
            sensitivity, the text lists the sums that are exact, and says which bound can be proved.

        Raises:
            ValueError: if no proof is known.
        """
        if self.proof is None:
            raise ValueError(
                "sensitivity must have a proof to be explained, got a sensitivity without a "
                "proof: try dpjax.prove_sensitivity"
            )
        return self.proof.explained()

    def __repr__(self) -> str:
        size = "any n" if self.n is None else f"n={self.n}"
        text = f"Sensitivity({shown_number(self.value)} in {norm_name(self.norm)}, {size}"
        text += f", {self.relation}{per_unit(self.privacy_unit)}"
        text += "".join(f", {note}" for note in self.notes) + f"; {self.method}"
        said = self.proof.summary if self.proof else ""
        text += f", {said}" if said and self.m is None else ""
        if self.m is not None:
            text += f", m={self.m}, k={self.k}, gamma={shown_number(self.gamma)}"
            text += f", {describe_confidence(self.confidence)}"
            text += f"; {said}" if said else ""
        return text + (f", positions={self.positions})" if self.positions != "last" else ")")


class Mechanism(Protocol):
    """A randomized function of a key and a target's value, calibrated to a sensitivity.

    A mechanism is a frozen pytree: epsilon, delta and the sensitivity's value are leaves, and norm
    and sizes are static. So you can pass a mechanism to functions under `jit` and `vmap`.
    Mechanisms that add noise also have a method `error(confidence=...)`, which bounds the distance
    of a release from the true value.
    """

    @property
    def norm(self) -> Norm:
        """The norm in which the sensitivity must have been measured."""
        ...

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity that the noise is calibrated to."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release."""
        ...

    @property
    def zcdp(self) -> tuple[float, float]:
        """The privacy cost of one release in approximate zCDP: rho and delta."""
        ...

    @property
    def dp_event(self) -> Any:
        """One release as a `DpEvent` for the package dp-accounting. The event ignores gamma."""
        ...

    def __call__(self, key: Key, value: Value, /) -> Release:
        """Releases a value of the target. Open ledgers pay for the release first."""
        ...

    def unpaid_draw(self, key: Key, value: Value, /) -> Value:
        """Draws the value of a release without notifying ledgers, for code that has paid."""
        ...

    def log_prob(self, output: Value, value: Value, /) -> jax.Array:
        """The log density of a released value; the log probability if outputs are discrete."""
        ...

    def clamped(self, value: Value, /) -> Value:
        """The value after clamping, to which the mechanism adds noise: finite and in range."""
        ...

    def grids(self, value: Value, /) -> PyTree:
        """The grid spacing of each released array; 0 without a grid; an empty pytree if unknown."""
        ...


def guarantee_in(candidate: object) -> Guarantee | None:
    """Returns the guarantee of a mechanism, a release or another object; None if it has none."""
    found = candidate if isinstance(candidate, Guarantee) else getattr(candidate, "guarantee", None)
    return found if isinstance(found, Guarantee) else None


def norm_name(norm: Norm) -> str:
    """Returns the name of a norm, for messages."""
    return norm if isinstance(norm, str) else getattr(norm, "__name__", repr(norm))


@dataclasses.dataclass(frozen=True)
class Inside:
    """How `dpjax.privatize` computes the release of a target internally.

    Attributes:
        target: the function that is evaluated on the database. For a query, it may differ from the
            query.
        mechanism: the mechanism that adds noise to the value of this function.
        published: computes the published value from the noisy value, and uses only public facts;
            None if the two values are the same.
        read: computes the noisy value from the published value, for `mechanism.log_prob`.
    """

    target: Any
    mechanism: Any
    published: Callable[[Value], Value] | None = None
    read: Callable[[Value], Value] = lambda value: value


class KnowsSensitivity(abc.ABC):
    """A target with a known bound on its sensitivity, which the target's docstring proves.

    Attributes:
        norms: the norms in which a bound is known.
        relations: the neighboring relations under which a bound is known.
        reads: how 64-bit columns are passed to the target without x64: as exact "numbers", as
            "floats", as "integers" clamped to int32, or as "arrays", for which 64-bit integers are
            refused.
        privacy_unit: the unit in which neighboring databases differ, as in `Guarantee`.
        notes: other facts that a guarantee must mention.
    """

    norms: tuple[Any, ...]
    relations: tuple[NeighboringRelation, ...]
    reads: Literal["numbers", "floats", "integers", "arrays"] = "arrays"
    privacy_unit: str = RECORD
    notes: tuple[str, ...] = ()

    @abc.abstractmethod
    def _bound(self, norm: Any, relation: NeighboringRelation, n: int | None, dtype: Any) -> float:
        """Returns the bound on the sensitivity, rounded up; 0 if no record can change the value."""

    @property
    def _is_rounded(self) -> bool:
        """Whether releases are computed from integers with noise. The bound is for these integers.

        Otherwise, noise is added to the value, and the bound is for the value.
        """
        return False

    def _inside(self, mechanism: Mechanism) -> Inside:
        """Returns how `dpjax.privatize` releases this target with a given mechanism."""
        return Inside(self, mechanism)

    def _bound_on(self, norm: Any, relation: NeighboringRelation, records: Database) -> float:
        """Returns the bound on the sensitivity for databases with these shapes and dtypes."""
        leaves = jax.tree.leaves(records)
        floats = [x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        coarsest = min(floats, key=lambda dtype: dtype.itemsize, default="float32")
        return float(self._bound(norm, relation, leaves[0].shape[0], coarsest))
