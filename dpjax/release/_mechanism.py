"""The base class of mechanisms: guarantee, checks of values, draws and releases."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._guarantee import SampledEvent
from dpjax._core._losses import MOST_DIMS, PairLoss, Risk, kind_of_losses, risk_of_kinds
from dpjax._core._open_ledgers import Drawing
from dpjax._core._pytree import TreeSpec, changed, frozen_pytree, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import (
    Guarantee,
    NeighboringRelation,
    Norm,
    Release,
    Scalar,
    Sensitivity,
    norm_name,
)
from dpjax._exact._numerics import is_float, outward
from dpjax._tracing._shards import computing_now
from dpjax.random._keys import check_key
from dpjax.release._draw import draw_of
from dpjax.release._transaction import pay_and_draw


@frozen_pytree
class SensitivityMechanism(abc.ABC):
    """A mechanism that is private for any two values within its sensitivity (Definition 9).

    Subclasses are frozen pytrees, which inherit the fields `sensitivity` and `epsilon`, and define
    the abstract methods. The delta of the guarantee is 0, unless a subclass has a field `delta`.
    Factory functions with lower-case names check arguments, calibrate the noise, and make
    mechanisms.

    Attributes:
        sensitivity: the sensitivity that the noise is calibrated to.
        epsilon: the epsilon of the guarantee.

    Formal guarantees:
        A subclass promises that the releases of any two values within the sensitivity are
        (epsilon, delta)-indistinguishable. This implies (epsilon, delta, gamma)-random DP.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta = 0.0
    _calls_user: ClassVar[bool] = False  # Whether the mechanism contains a function of the user.
    # Names of fields that are proportional to the sensitivity.
    _scales: ClassVar[tuple[str, ...]] = ()

    @property
    def norm(self) -> Norm:
        """The norm in which the sensitivity is measured."""
        return self.sensitivity.norm

    @abc.abstractmethod
    def _draw(self, key: Key, value: Value) -> Value:
        """Draws the noisy value, as a pure function that is compiled once for all epsilons.

        It is called on a copy of the mechanism, whose sensitivity has only the fields `value`,
        `norm`, `relation` and `zero_allowed`. Other fields, such as m and gamma, do not affect the
        noise.
        """

    @abc.abstractmethod
    def log_prob(self, output: Value, value: Value) -> jax.Array:
        """The log density of an output, or the log probability if outputs are discrete.

        Args:
            output: the value of a release.
            value: the target's value, without noise.

        Returns:
            A scalar.
        """

    @abc.abstractmethod
    def clamped(self, value: Value) -> Value:
        """The value after clamping, to which the mechanism adds noise: finite and in range."""

    def grids(self, value: Value) -> PyTree:
        """The grid spacing of each array of a release; an empty pytree if it is unknown."""
        del value
        return ()

    @property
    def dp_event(self) -> Any:
        """One release as an event of the package dp-accounting.

        The event does not include gamma. For a sampled sensitivity, gamma is the fraction of pairs
        of neighboring databases whose values may differ by more than the sensitivity.

        By default it is the event of the Laplace mechanism at epsilon' = 2 log((1 + e^epsilon) /
        2), which dominates every epsilon-DP mechanism. Proof: among all epsilon-DP mechanisms,
        binary randomized response has the largest hockey-stick divergence (Kairouz, Oh and
        Viswanath 2015). Let 0 <= t <= epsilon, and x = e^(t/2). At t, the divergence of this
        Laplace mechanism exceeds that of randomized response by (1 - x)^2 / (1 + e^epsilon). For
        t > epsilon, the divergence of randomized response is 0.

        dp-accounting applies its default neighboring relation to this event, and to the events of
        Laplace and Gaussian noise. So one accountant can compose all of these events.
        """
        accounting = _checks.extra("dp_accounting", "accounting")
        if self.sensitivity.zero_allowed or not self._is_exact:
            return accounting.NonPrivateDpEvent()
        charged = 2 * (np.logaddexp(0.0, float(self.epsilon)) - math.log(2)) * (1 + 1e-12)
        return accounting.LaplaceDpEvent(float(1 / charged))

    @property
    def zcdp(self) -> tuple[float, float]:
        """The cost of one release with ideal noise: rho and delta of approximate zCDP, rounded up.

        An (epsilon, delta)-DP release has rho = epsilon^2 / 2 and the same delta (Bun and Steinke
        2016, Proposition 1.4 and section 8). gamma is not included.
        """
        if self.sensitivity.zero_allowed or not self._is_exact:
            return math.inf, 1.0
        return float(self.epsilon) ** 2 / 2 * (1 + 1e-12), float(self.delta)

    @property
    def risk(self) -> Risk:
        """What any attack can learn from one release, see `Risk`.

        For Gaussian and Laplace noise, the result uses the distribution of the privacy loss. For
        other mechanisms, it uses epsilon and delta. The cost of noise tables is included for up to
        2^20 coordinates. `dpjax.accounting.risk` accepts other numbers of coordinates, and several
        releases.
        """
        accounting = _checks.extra("dp_accounting", "accounting")
        promised = self.guarantee
        numbers = promised.epsilon, promised.delta, promised.gamma
        if any(map(_checks.is_traced, numbers)) or np.ndim(numbers[0]):
            raise TypeError(
                "risk needs a single mechanism with concrete parameters, got traced parameters "
                "or a batch: call it outside of jit and vmap"
            )
        epsilon, delta, gamma = map(float, numbers)
        kind = kind_of_losses(accounting, self.dp_event, epsilon, delta)
        return risk_of_kinds(((kind, 1),), promised.relation, gamma, MOST_DIMS)

    @property
    def advantage(self) -> float:
        """The largest advantage of a membership attack on one release, see `Risk.advantage`."""
        return self.risk.advantage

    def tradeoff(self, false_positive_rate: ArrayLike) -> np.ndarray:
        """The least false negative rate of any membership attack on one release.

        Args:
            false_positive_rate: in [0, 1], any shape.

        Returns:
            An array of the same shape, rounded down.
        """
        return self.risk.tradeoff(false_positive_rate)

    def reconstruction_bound(self, prior: float) -> float:
        """Bounds how often an attacker reconstructs a record from one release.

        Args:
            prior: the largest probability of success without the release, in [0, 1].

        Returns:
            The largest probability of success with the release, rounded up.
        """
        return self.risk.reconstruction_bound(prior)

    def pair_loss(self, value: Value) -> PairLoss:
        """The privacy loss of a release on one pair of databases, for `dpjax.privacy_profile`.

        Args:
            value: a pytree of arrays or `jax.ShapeDtypeStruct`s, like the target's value.

        Returns:
            A `PairLoss`.

        Raises:
            TypeError: if the loss is unknown, or the noise is in floats.
        """
        del value
        raise TypeError(
            "mechanism must have a known privacy loss on each pair, got a "
            f"{type(self).__name__}: the loss is known only for exact Laplace and Gaussian "
            "noise, `exponential` and `permute_and_flip`, with a public scale above 0"
        )

    def _in_pieces(self, value: TreeSpec) -> Callable[[Key, Value], Value] | None:
        """Returns a function that draws outside of `jit`, or None.

        The function runs compiled programs that serve many shapes. None means that the draw is a
        single program, compiled for the shapes of `value`. The function computes with JAX arrays,
        not with Python floats, so that its results are rounded as in `jit`.
        """
        del value
        return None

    def _accuracy(self, value: Value) -> Accuracy:
        """Returns the accuracy of a release whose value is like `value` in shapes and dtypes."""
        del value
        return UNKNOWN

    def accuracy(self, value: TreeSpec) -> Accuracy:
        """The accuracy of a release, for `Release.interval`; unknown if a parameter is traced.

        Args:
            value: describes the target's value.

        Returns:
            An `Accuracy`, made of public facts alone.
        """
        traced = _checks.any_traced(self)
        with computing_now(), jax.debug_nans(False), jax.debug_infs(False):
            found = UNKNOWN if traced else self._accuracy(value.tree())
        return found.having(mechanism=type(self).__name__, norm=norm_name(self.sensitivity.norm))

    def _check_value(self, value: Value) -> None:
        """Refuses values of a shape or dtype that the mechanism does not accept."""
        del value  # By default, all values are accepted.

    def _checked(self, value: Value) -> Value:
        """Converts a value to arrays that the mechanism accepts."""
        arrays = _checks.real_arrays("value", value)
        self._check_value(arrays)
        return arrays

    @property
    def _is_exact(self) -> bool:
        """Whether the noise is exact. Noise in floats carries no guarantee."""
        return True

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release. All numbers are NaN if a traced parameter was bad."""
        sensitivity = self.sensitivity
        if not self._is_exact:
            return nothing_promised(self.epsilon, sensitivity.relation, sensitivity.privacy_unit)
        gamma = _nan_with(self.epsilon, sensitivity.gamma)
        confidence = sensitivity.confidence
        if confidence is not None:
            confidence = _nan_with(self.epsilon, confidence, -math.inf)
        averaged = ("averaged over positions",) if sensitivity.positions == "average" else ()
        no_noise = ("no noise",) if sensitivity.zero_allowed else ()
        events = ()
        if sensitivity.identity is not None:
            decided = sensitivity.deciding_records
            events = (SampledEvent(gamma, confidence, sensitivity.identity, decided),)
        return Guarantee(
            self.epsilon,
            _nan_with(self.epsilon, self.delta),
            gamma,
            confidence,
            events,
            sensitivity.relation,
            (*sensitivity.notes, *averaged, *no_noise),
            privacy_unit=sensitivity.privacy_unit,
        )

    def __call__(self, key: Key, value: Value) -> Release:
        """Releases a value of the target under the mechanism's guarantee.

        Args:
            key: a typed key from `dpjax.random.secure_key`, used for nothing else. Two releases of
                the same value with the same key, at two epsilons, reveal the value. An open ledger
                (`dpjax.Ledger`, `dpjax.random.KeyLedger`) records the key as used.
            value: a pytree of real arrays. Whether a release happens never depends on its contents:
                NaN and values out of range are replaced by public values, and get noise.

        Returns:
            A `Release`. If the key came from a seed, its guarantee says so.

        Raises:
            TypeError: if the key is not a typed key, the value does not consist of real arrays, or
                a ledger is open inside of `jit` or `vmap`.
            ValueError: if the value's structure or shapes differ from the sampled ones; if the
                mechanism is a batch that `vmap` returned; if `vmap` maps over values (or
                `shard_map` shards values) but not over keys, so that all values would get the same
                noise; or if a ledger has recorded the key before.
            BudgetExceededError: if the remaining budget of an open `dpjax.Ledger` is too small.
        """
        check_key(key)
        arrays = _checks.real_arrays("value", value)
        kind = TreeSpec.of(arrays)
        draw = draw_of(self, kind)
        release = pay_and_draw(
            lambda: draw(key, arrays),
            key,
            (self, arrays),
            guarantee=draw.promised(self, key),
            what=type(self).__name__,
            drawing=Drawing.of(self, kind),
        )
        return Release(release.value, release.guarantee, draw.accuracy(self))

    def unpaid_draw(self, key: Key, value: Value) -> Value:
        """Draws a noisy value without notifying ledgers, for code that has already paid.

        It is for releases that consist of several draws and pay once for all draws. All other code
        should call the mechanism itself.

        Args:
            key: a typed key, used for nothing else.
            value: a pytree of real arrays.

        Returns:
            The same as `mechanism(key, value).value`.

        Raises:
            TypeError: as for `mechanism(key, value)`.
            ValueError: as for `mechanism(key, value)`.
        """
        check_key(key)
        arrays = _checks.real_arrays("value", value)
        draw = draw_of(self, TreeSpec.of(arrays))
        # Under `jax_debug_nans`, a NaN in a private value would raise an error and so reveal it.
        with jax.debug_nans(False), jax.debug_infs(False):
            return draw(key, arrays)

    def _in_units_of(self, unit: float, larger: float) -> Self:
        """Returns the mechanism for values divided by `unit`, with `larger` times as much noise."""
        sensitivity = dataclasses.replace(
            self.sensitivity, value=self.sensitivity.value * (larger / unit), inside=False
        )
        scales = {name: getattr(self, name) * (larger / unit) for name in self._scales}
        return changed(self, sensitivity=sensitivity, **scales)

    def _check_unclamped(self) -> None:
        """Refuses a direct call if the mechanism's sensitivity only holds inside `privatize`."""
        if self.sensitivity.inside:
            raise ValueError(
                "the sensitivity holds for the exact integers that dpjax.privatize computes. A "
                f"direct call of a {self.sensitivity.known_by} returns rounded floats, for which "
                "the sensitivity does not hold: release by dpjax.privatize(query, mechanism)"
            )
        if self.sensitivity.bounds is not None:
            raise ValueError(
                "the sensitivity was proved for clamped records, and this value may come from"
                " records that were not clamped: release by dpjax.privatize(target, mechanism),"
                " which clamps the records"
            )

    def _check_like_sampled(self, value: TreeSpec) -> None:
        """Refuses values whose structure, shapes or dtypes differ from the sampled values."""
        sampled = self.sensitivity.outputs
        if sampled is not None and (
            value.form != sampled.form
            or [*map(is_float, value.leaves)] != [*map(is_float, sampled.leaves)]
        ):
            raise ValueError(
                "value must have the structure, shapes and dtypes of the sampled values, "
                f"{sampled}, got {value}"
            )

    def _frozen(self, value: TreeSpec) -> Self:
        """Returns the mechanism with each function of the user replaced by its traced program.

        Mechanisms are keys in the cache of compiled draws. A user's function must not be part of
        such a key: it may compute something else later, and two different functions may compare
        equal.
        """
        del value
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.guarantee!r}; {self.sensitivity!r})"


def nothing_promised(
    epsilon: Scalar, relation: NeighboringRelation, privacy_unit: str
) -> Guarantee:
    """Returns the guarantee of a release with inexact float noise: epsilon infinite, delta 1."""
    return Guarantee(
        _nan_with(epsilon, math.inf),
        _nan_with(epsilon, 1.0),
        relation=relation,
        notes=("not private: noise in floats",),
        privacy_unit=privacy_unit,
    )


def _nan_with(epsilon: Scalar, value: Scalar, toward: float = math.inf) -> Scalar:
    if isinstance(epsilon, float):
        return value
    return jnp.where(jnp.isnan(epsilon), jnp.nan, outward(value, toward))
