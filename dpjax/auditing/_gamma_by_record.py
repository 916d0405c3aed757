"""`gamma_by_record`: how often the guarantee does not cover a pair that contains a given record."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import (
    NeighboringRelation,
    OperatingPoint,
    Sensitivity,
    Target,
    describe_confidence,
)
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper, outward
from dpjax._running._devices import outside_any_mesh
from dpjax.auditing._profile_pairs import other_pairs, sampled_distances
from dpjax.oracles._independent import IndependentRecords
from dpjax.random._keys import sampling_key
from dpjax.release._privatize import as_released
from dpjax.sensitivity._norms import check_norm
from dpjax.sensitivity._plan import Plan
from dpjax.sensitivity._sample_sensitivity import rounding_of_a_distance, sample_distances

_GAMMA = 0.05
# A bound on the relative error of SciPy's binomial tail probabilities.
_ERROR = 1e-9


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RecordGammas:
    """The gamma of single records; made by `dpjax.gamma_by_record`.

    Attributes:
        records: a pytree of arrays with leading axis K.
        uncovered: for each record, the number of pairs that may be farther apart than the
            sensitivity, given the rounding of distances.
        certain: for each record, the number of pairs that are certainly farther apart.
        pairs: J, the number of pairs drawn for each record.
        drawn: whether the records were drawn from the oracle.
        confidence: the confidence of all limits together.

    Formal guarantees:
        Those of `dpjax.gamma_by_record`.
    """

    records: PyTree
    uncovered: np.ndarray
    certain: np.ndarray
    pairs: int
    drawn: bool
    confidence: float

    @property
    def estimates(self) -> np.ndarray:
        """For each record, the fraction of pairs that may be farther apart than the sensitivity."""
        return self.uncovered / self.pairs

    @property
    def lower(self) -> np.ndarray:
        """Lower limits of gamma, valid for all records at once."""
        return clopper_pearson_lower(self.certain, self.pairs, self._error_of_a_limit)

    @property
    def upper(self) -> np.ndarray:
        """Upper limits of gamma, valid for all records at once."""
        return clopper_pearson_upper(self.uncovered, self.pairs, self._error_of_a_limit)

    @property
    def _error(self) -> Fraction:
        # If records were drawn, half of the allowed error probability is reserved for
        # `share_above`.
        return (1 - Fraction(self.confidence)) / (2 if self.drawn else 1)

    @property
    def _error_of_a_limit(self) -> float:
        return float(self._error / (2 * len(self.uncovered))) * (1 - 1e-15)

    def share_above(self, x: float) -> float:
        """An upper limit of the fraction of people whose record has a gamma above x.

        The gamma of a record is the fraction of its pairs that the sensitivity does not cover. The
        limits are valid for all x at once.

        Args:
            x: in (0, 1).

        Returns:
            A number from 0 to 1.

        Raises:
            TypeError: if x is not a number.
            ValueError: if x is out of range, or the records were not drawn from the oracle.
        """
        x = _checks.fraction("x", x)
        if not self.drawn:
            raise ValueError(
                "share_above needs a random sample of records, got records that were passed to"
                " gamma_by_record: pass a number of records, which are then drawn from the oracle"
            )
        counts = np.arange(self.pairs)
        above = (self.uncovered[:, None] > counts).sum(0)
        error = float(self._error / self.pairs) * (1 - 1e-15)
        shares = clopper_pearson_upper(above, len(self.uncovered), error)
        likely = scipy.special.betainc(counts + 1, self.pairs - counts, x) * (1 - _ERROR)
        return float(np.min(shares / np.maximum(likely, 1e-300), initial=1.0))

    def __repr__(self) -> str:
        worst = f"largest estimate {self.estimates.max():.4g}, at most {self.upper.max():.4g}"
        size = f"{len(self.uncovered)} records, {self.pairs} pairs each"
        return f"RecordGammas({size}; {worst}; {describe_confidence(self.confidence)})"


@frozen_pytree
class _WithRecord(IndependentRecords):
    """An oracle of independent records that has a given record at one index."""

    oracle: IndependentRecords
    known: PyTree
    place: int = static()

    def record(self, key: Key) -> PyTree:
        return self.oracle.record(key)

    def at(self, key: Key, numbers: jax.Array) -> Database:
        def put(drawn: jax.Array, known: jax.Array) -> jax.Array:
            here = jnp.expand_dims(numbers == self.place, tuple(range(1, drawn.ndim)))
            return jnp.where(here, known[None], drawn)

        return jax.tree.map(put, self.oracle.at(key, numbers), self.known)


@outside_any_mesh
def gamma_by_record(
    key: jax.Array,
    target: Target,
    oracle: IndependentRecords,
    *,
    sensitivity: Sensitivity,
    n: int,
    records: PyTree | int,
    pairs: int,
    confidence: float = 0.99,
) -> RecordGammas:
    """For each record r, the fraction of its pairs that a sensitivity does not cover: gamma(r).

    Let G be the distance of the values of a random pair, and Delta the sensitivity. Then gamma(r) =
    P(G > Delta | record r). Here r is fixed, while the other n - 1 records and the record that
    replaces r are random. The gamma of a sampled sensitivity bounds P(G > Delta), the average of
    gamma(r) over people.

    Args:
        key: a typed key, as for `dpjax.sample_sensitivity`. Under the same key, the pairs differ
            from the pairs of that function.
        target: as for the sampled sensitivity.
        oracle: an oracle of independent records, from `dpjax.oracles`.
        sensitivity: sampled at positions="last", or a bound.
        n: the number of records of a database, at least 1.
        records: K records, a pytree of arrays with leading axis K; or the number K, to draw them.
        pairs: J, the number of pairs for each record.
        confidence: probability that all limits of the result are correct.

    Returns:
        A `RecordGammas`, with `.estimates`, `.lower`, `.upper` and, if records were drawn,
        `.share_above(x)`. `dpjax.plotting.gamma_by_record` draws it.

    Raises:
        TypeError: if an argument has the wrong type, or the oracle does not draw record by record.
        ValueError: if a size is out of range, or the records are not like the oracle's. Also if
            the sensitivity belongs to another target, n, relation or position.

    Formal guarantees:
        Records are independent, and neighbors are replace-one. Choose target, sensitivity, records,
        n, J and the confidence C without these pairs. With probability at least C, both of the
        following statements are true. `lower` and `upper` enclose gamma(r) for all K records
        (Clopper and Pearson at (1 - C) / (2 K) each). For all x at once, at most a fraction
        `share_above(x)` of all people has gamma(r) > x. For drawn records each statement gets half
        of 1 - C. Never use the private records here.

        Distances are known up to rounding, with the margin that `dpjax.sample_sensitivity` adds. So
        `lower` counts pairs whose distance minus the margin exceeds Delta, while `upper`,
        `estimates` and `share_above` count pairs whose distance plus the margin does.

        For `share_above`, let N be the number of uncovered pairs of a drawn person. If gamma(r) >
        x, then N exceeds c with probability at least b(c) = P(Bin(J, x) > c). So P(gamma(R) > x) <=
        P(N > c) / b(c) for each c. Clopper-Pearson limits at (1 - C) / (2 J) from K draws bound P(N
        > c) for all J values of c at once.

    Source:
        Clopper and Pearson (1934); Steinke and Ullman (2020), who criticize averages.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> oracle = dpjax.oracles.independent(jax.random.exponential)
        >>> mean = dpjax.targets.summable(lambda x: x, average=True)
        >>> key = dpjax.random.seeded_key(0)
        >>> sensitivity = dpjax.sample_sensitivity(
        ...     key, mean, oracle, n=100, norm="l1", gamma=0.05
        ... )
        >>> found = dpjax.gamma_by_record(
        ...     key,
        ...     mean,
        ...     oracle,
        ...     sensitivity=sensitivity,
        ...     n=100,
        ...     records=jnp.array([1.0, 9.0]),
        ...     pairs=1000,
        ... )
        >>> bool(found.upper[0] < 0.1), bool(found.lower[1] > 0.9)
        (True, True)
    """
    key = sampling_key(key)
    _checks.host_only("gamma_by_record", key, "what was found before")
    if not isinstance(oracle, IndependentRecords):
        raise TypeError(
            "oracle must draw record by record, as dpjax.oracles.independent does, got"
            f" {_checks.shown(oracle)}"
        )
    n = _checks.integer("n", n, least=1)
    pairs = _checks.integer("pairs", pairs, least=1)
    confidence = _checks.fraction("confidence", confidence)
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(f"sensitivity must be a Sensitivity, got {_checks.shown(sensitivity)}")
    if sensitivity.n not in (None, n):
        raise ValueError(f"n must be {sensitivity.n}, as for the sensitivity, got n={n}")
    replaces = sensitivity.relation is NeighboringRelation.REPLACE_ONE
    if not replaces or sensitivity.positions != "last":
        raise ValueError('sensitivity must be for replace-one neighbors and positions="last"')
    check_norm(sensitivity)
    target = as_released(_checks.function("target", target), sensitivity)
    point = OperatingPoint(pairs, pairs, _GAMMA, None, "exact", confidence)
    _, hidden, plan = sampled_distances(
        key, target, oracle, n=n, norm=sensitivity.norm, positions="last", point=point
    )
    if sensitivity.target not in (None, plan.pair.released.fingerprint):
        raise ValueError("target must be the one whose sensitivity was sampled, got another")
    # A key is derived, so that these pairs differ from the pairs that determined Delta.
    key_records, key_pairs = jax.random.split(other_pairs(plan.key))
    drawn = isinstance(records, (int, np.integer)) and not isinstance(records, bool)
    if drawn:
        known = oracle(key_records, _checks.integer("records", records, least=1))
    else:
        known = _checks.real_arrays("records", records)
        _check_records(known, oracle)
    counts = _further_apart(key_pairs, target, oracle, sensitivity, known, plan, hidden)
    return RecordGammas(known, *counts, pairs, drawn, confidence)


def _check_records(known: PyTree, oracle: IndependentRecords) -> None:
    drawn = TreeSpec.of(jax.eval_shape(oracle.record, jax.random.key(0)))
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), known)
    sizes = {x.shape[:1] for x in jax.tree.leaves(known)}
    if TreeSpec.of(one) != drawn or len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            f"records must have the structure of the oracle's records, {drawn}, got "
            f"{TreeSpec.of(known)}"
        )


def _further_apart(
    key: Key,
    target: Target,
    oracle: IndependentRecords,
    sensitivity: Sensitivity,
    known: PyTree,
    plan: Plan,
    hidden: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two counts of pairs for each record.

    The first counts the pairs whose distance may exceed the sensitivity. The second counts the
    pairs whose distance certainly exceeds the sensitivity.
    """
    value = float(sensitivity.value)
    hidden += rounding_of_a_distance(plan, sensitivity.norm, value)
    least, most = outward(value - hidden, -np.inf), outward(value + hidden, np.inf)

    @jax.jit
    def count(known: PyTree) -> jax.Array:
        def of_one(numbered: tuple[jax.Array, PyTree]) -> jax.Array:
            number, record = numbered
            distances = sample_distances(
                jax.random.fold_in(key, number),
                target,
                _WithRecord(oracle, record, plan.pair.n - 1),
                n=plan.pair.n,
                norm=sensitivity.norm,
                m=plan.point.m,
                chunk_size=plan.layout.size,
            )
            wide = distances.astype(jnp.result_type(float))
            # A pair whose distance is NaN may be uncovered, but does not count as certainly
            # uncovered.
            further = jnp.stack([~(wide <= least), wide > most])
            return jnp.sum(further, axis=1, dtype=jnp.int32)

        numbers = jnp.arange(len(jax.tree.leaves(known)[0]), dtype=jnp.uint32)
        # Records are processed one after the other, because a batch over K records would need K
        # times the memory.
        return jax.lax.map(of_one, (numbers, known))

    may, do = np.asarray(count(known)).astype(np.int64).T
    return may, do
