"""Sensitivities that the user states and vouches for."""

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import NeighboringRelation, Norm, Scalar, Sensitivity
from dpjax.sensitivity._norms import norm_function


def assume_sensitivity(
    value: Scalar,
    *,
    norm: Norm,
    n: int | None = None,
    relation: NeighboringRelation | None = None,
    allow_zero: bool = False,
) -> Sensitivity:
    """A global bound: sup ||f(D) - f(D')|| over all pairs of neighboring databases.

    Args:
        value: the bound, in the units of the target's output; finite, above 0.
        norm: "l1", "l2", "linf", "hamming", "range", or a function of the difference of two values.
        n: the number of records for which the bound is valid; None if it is valid for any number.
            Under add-or-remove-one, n is the public number of slots.
        relation: which databases are neighbors. None takes the relation of an open ledger, or
            replace-one if no ledger is open.
        allow_zero: accepts a bound of 0; the target is then released without noise.

    Returns:
        A `Sensitivity` with gamma 0 and confidence 1.

    Raises:
        TypeError: if the bound is not a number.
        ValueError: if the bound is not finite and above 0, if n is below 1, or if the norm is
            unknown.

    Formal guarantees:
        You vouch for the bound. It must hold for the target as it is computed, with the rounding of
        its float dtype, and with NaN counted as 0, as releases count it. Then mechanisms calibrated
        to the bound are (epsilon, delta)-DP.

    Source:
        Dwork, McSherry, Nissim and Smith (2006), Definition 2.

    Example:
        >>> import dpjax
        >>> dpjax.assume_sensitivity(1 / 1000, norm="l1", n=1000)
        Sensitivity(0.001 in l1, n=1000, replace-one; assumed)
    """
    norm_function(norm)
    if n is not None:
        n = _checks.integer("n", n, least=1)
    if relation is not None and not isinstance(relation, NeighboringRelation):
        raise TypeError(f"relation must be a NeighboringRelation, got {_checks.shown(relation)}")
    if allow_zero:
        _checks.host_only("allow_zero", value, "a concrete bound")
    bound = (_checks.non_negative if allow_zero else _checks.positive)("value", value)
    zero = allow_zero and bool(bound == 0)
    neighbors = relation_or_inherited(relation)
    return Sensitivity(bound, 0.0, 1.0, norm, n, neighbors, zero_allowed=zero)
