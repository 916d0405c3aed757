"""An accountant that simulates privacy losses, for mechanisms without a formula for them."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD, SampledEvent, check_privacy_unit
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Key
from dpjax._core._values import Guarantee, NeighboringRelation, guarantee_in
from dpjax._exact._numerics import TailBand, bisect
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import Program, kept_jit
from dpjax.random._keys import check_key, sampling_key

_CHUNK = 2**14
# Each loss x is increased by this number times 1 + |x|, which covers float64 rounding errors.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedLosses:
    """Privacy losses that were simulated; made by `monte_carlo`.

    Attributes:
        confidence: the probability, over the random draws, that all upper limits from `epsilon` and
            `delta` are correct.
        draws: how many losses were drawn in each direction.
        relation: which databases are neighbors.
        privacy_unit: the unit of data in which neighbors differ, as in `Guarantee`.
        source: the function that drew the losses.

    Formal guarantees:
        Those of `monte_carlo`.
    """

    confidence: float
    draws: int
    relation: NeighboringRelation
    privacy_unit: str
    source: Callable[[Key], jax.Array]
    _bands: tuple[TailBand, ...]
    _identity: str

    def delta(self, epsilon: float) -> float:
        """An upper limit of the least delta with (epsilon, delta)-DP.

        Args:
            epsilon: finite, at least 0.

        Returns:
            A number in (0, 1]. Even for large epsilons it is above 0, by an amount that falls with
            the number of draws.
        """
        epsilon = float(_checks.non_negative("epsilon", epsilon))

        def curve(losses: np.ndarray) -> np.ndarray:
            return -np.expm1(np.minimum(epsilon - losses, 0.0))

        return max(float(band.mean(curve)) for band in self._bands)

    def epsilon(self, delta: float) -> float:
        """An upper limit of the least epsilon with (epsilon, delta)-DP.

        Args:
            delta: in (0, 1).

        Returns:
            A number, at least 0.

        Raises:
            ValueError: if the number of draws is too small to show this delta.
        """
        delta = float(_checks.fraction("delta", delta))
        if self.delta(0.0) <= delta:
            return 0.0
        points = np.concatenate([band.points for band in self._bands])
        largest = float(np.max(points, where=np.isfinite(points), initial=0.0))
        if self.delta(largest) > delta:
            raise ValueError(
                f"delta={delta:g} is too small for draws={self.draws}, which can only show"
                f" {self.delta(largest):.2g} and above: take more draws, or a larger delta"
            )
        return bisect(lambda x: self.delta(x) > delta, 0.0, largest)[1]

    def guarantee(self, delta: float) -> Guarantee:
        """The guarantee at a delta, with the confidence of the simulation.

        Args:
            delta: in (0, 1).

        Returns:
            A `Guarantee`. `compose` counts one simulation once, and adds up the failure
            probabilities of different simulations.
        """
        return self.stated(self.epsilon(delta), float(delta))

    def stated(self, epsilon: float, delta: float, notes: tuple[str, ...] = ()) -> Guarantee:
        """A guarantee with this epsilon and delta, and the confidence of the simulation."""
        event = SampledEvent(0.0, self.confidence, self._identity)
        return Guarantee(
            epsilon,
            delta,
            confidence=self.confidence,
            events=(event,),
            relation=self.relation,
            notes=(*notes, "by simulation"),
            privacy_unit=self.privacy_unit,
        )

    def __repr__(self) -> str:
        return f"SimulatedLosses(draws={self.draws}, confidence={self.confidence:g})"


def monte_carlo(
    key: Key,
    sample_losses: Callable[[Key], jax.Array],
    *,
    draws: int,
    confidence: float = 0.99,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
) -> SimulatedLosses:
    """Accounts for a mechanism whose privacy loss can be drawn, by a simulation.

    delta(epsilon) is the mean of max(0, 1 - e^(epsilon - L)), where L is the privacy loss of a
    dominating pair of distributions P and Q: log P(x) / Q(x) for x from P. You write the function
    that draws L. A simulation suits samplings of batches for which no formula is known.

    Args:
        key: a typed key. Choose the key before you look at any result, and do not try several keys.
        sample_losses: `sample_losses(key)` returns one loss, or an array with one loss for each
            direction: P against Q, and Q against P. It is traced with 64-bit numbers, and must
            return float64. Losses may be infinite; NaN counts as infinity.
        draws: how many losses are drawn, at least about 20 / delta for the smallest delta you need.
        confidence: the probability that all limits hold, for all epsilons and directions together.
        relation: which databases are neighbors; None for the relation of an open ledger, or
            replace-one if no ledger is open.
        privacy_unit: as in `Guarantee`.

    Returns:
        A `SimulatedLosses`: `delta(epsilon)`, `epsilon(delta)` and `guarantee(delta)`.

    Raises:
        TypeError: if `sample_losses` is not a function of a key, or does not return float64; for
            mechanisms, whose guarantee is already known.
        ValueError: if a parameter is out of range, or losses have another shape.

    Formal guarantees:
        If P and Q dominate every pair of neighboring databases, the limits hold with probability at
        least `confidence` over the simulation. Domination is your proof, and this function cannot
        check it. It must cover adaptive mechanisms, where a step may depend on results of earlier
        steps, such as every training. If different pairs P, Q dominate for different databases,
        return the losses of each pair as a separate direction.

        The limits have no asymptotics. Order statistics of the losses have exact limits
        (Clopper-Pearson), and the mean of a monotone function between 0 and 1 follows from them.
        Losses are raised by 10^-9 for rounding.

    Source:
        Wang, Mahloujifar, Wu, Jia and Mittal, "A randomized approach to tight privacy accounting"
        (2023), for the estimate; docs/proofs/privacy-profile.md for the limits.

    Example:
        >>> import jax
        >>> import dpjax
        >>> def gaussian_loss(key):
        ...     return jax.random.normal(key, dtype="float64") + 0.5
        >>> found = dpjax.accounting.monte_carlo(
        ...     dpjax.random.seeded_key(0), gaussian_loss, draws=100_000
        ... )
        >>> found.guarantee(1e-2)
        (epsilon=2.37..., delta=0.01, gamma=0)-random DP, confidence 0.99, ...
    """
    check_key(key)
    _checks.host_only("monte_carlo", key, "it outside")
    if guarantee_in(sample_losses) is not None:
        raise TypeError(
            "sample_losses must be a function that draws privacy losses, got an object with a"
            f" guarantee, {_checks.shown(sample_losses)}: use compose_at"
        )
    _checks.function("sample_losses", sample_losses)
    draws = _checks.integer("draws", draws, least=100, most=10**9)
    confidence = float(_checks.fraction("confidence", confidence))
    relation = relation_or_inherited(relation)
    check_privacy_unit(privacy_unit)
    seed = sampling_key(key)
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((), seed.dtype)
        program = Program.trace("sample_losses", sample_losses, spec)
        kinds = [(leaf.dtype, len(leaf.shape)) for leaf in program.outputs.leaves]
        if kinds not in ([(np.float64, 0)], [(np.float64, 1)]):
            raise TypeError(
                "sample_losses must return a number or a vector in float64, got"
                f" {program.outputs}: leave out casts, and draw with dtype='float64'"
            )
        if not program.is_concrete:
            raise TypeError(
                "sample_losses closes over a traced value: call monte_carlo outside of jit and vmap"
            )
        losses = _drawn(seed, program, draws)
    error = (1 - Fraction(confidence)) / losses.shape[1]
    raised = losses + _ROUNDING * (1 + np.abs(losses))
    bands = tuple(TailBand.of(column, error) for column in raised.T)
    words = jax.random.key_data(seed)
    identity = digest("simulated losses", program.fingerprint, words, draws)
    return SimulatedLosses(
        confidence, draws, relation, privacy_unit, sample_losses, bands, identity
    )


def _drawn(key: Key, program: Program, draws: int) -> np.ndarray:
    """Returns simulated privacy losses, with shape (draws, directions)."""
    size = min(draws, _CHUNK)
    found = [
        np.asarray(_chunk(key, jnp.uint32(start), program=program, size=size))
        for start in range(0, draws, size)
    ]
    return np.concatenate(found)[:draws].reshape(draws, -1)


@kept_jit("program", "size")
def _chunk(key: Key, start: jax.Array, *, program: Program, size: int) -> jax.Array:
    numbers = start + lax.iota(jnp.uint32, size)
    return jax.vmap(lambda number: program(jax.random.fold_in(key, number)))(numbers)
