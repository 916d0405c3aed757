"""Checks that the noise of a mechanism is large enough for a target of known sensitivity.

The guarantee of a mechanism is for pairs of values within its own sensitivity. If one record could
change the target more, the guarantee of the release would be false. The checks depend only on
public facts.
"""

import dataclasses
import inspect
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._values import Inside, KnowsSensitivity, Mechanism, Sensitivity, Target, norm_name
from dpjax._tracing._programs import Unchanging

M = TypeVar("M", bound=Mechanism)
# `needed` rounds bounds up. A user may pass the bound rounded to nearest, which is smaller by at
# most this factor. The scale of the drawn noise has a larger margin.
_TO_NEAREST = 1 + 2.0**-50
_COMPILED = type(jax.jit(lambda: None))


def check_maker(target: Target, sensitivity: Sensitivity) -> None:
    """Refuses a sensitivity made by a query's method, if the target is not a query."""
    if sensitivity.records is None and sensitivity.known_by and knowing(target) is None:
        raise ValueError(
            f"sensitivity was made by a {sensitivity.known_by}, but the target is another function:"
            f" release the {sensitivity.known_by} itself, on the columns that it needs. For a"
            " function of your own, prove a bound by dpjax.prove_sensitivity, or state a bound by"
            " dpjax.assume_sensitivity"
        )


def needed(target: Target, sensitivity: Sensitivity, records: TreeSpec) -> float:
    """The target's known sensitivity, in the norm and relation of the given sensitivity.

    For a sampled or proved sensitivity the result is 0, because `privatize` compares traced
    programs instead. A sampled sensitivity may be smaller than the known sensitivity; its gamma
    accounts for this.

    Returns:
        A number, rounded up; 0 if no sensitivity is known, so that any noise is accepted.

    Raises:
        ValueError: if the target knows its sensitivity, but not in this norm under this relation.
    """
    known = knowing(target)
    if known is None or sensitivity.records is not None:
        return 0.0
    norm, relation = sensitivity.norm, sensitivity.relation
    if norm not in known.norms or relation not in known.relations:
        norms, relations = map(norm_name, known.norms), map(str, known.relations)
        raise ValueError(
            "sensitivity must be in a norm and relation for which the target, a "
            f"{type(known).__name__}, knows its sensitivity: in {', '.join(norms)} under "
            f"{' or '.join(relations)}, got a sensitivity in {norm_name(norm)} under {relation}. "
            "If you have a bound of your own, release a function around the target: lambda "
            "database: target(database)"
        )
    if sensitivity.privacy_unit != known.privacy_unit:
        raise ValueError(
            f"sensitivity must be for the privacy unit of this target, {known.privacy_unit!r}, "
            f"got a sensitivity for {sensitivity.privacy_unit!r}: make the mechanism with "
            "target.sensitivity(...)"
        )
    return known._bound_on(norm, relation, records.tree())


def covering(mechanism: M, needed: float) -> M:
    """Checks that the noise of a mechanism covers the sensitivity that a target needs.

    Returns:
        The mechanism itself. If its sensitivity is traced, all numbers of the mechanism become NaN
        if the sensitivity is too small.

    Raises:
        ValueError: if the sensitivity is too small.
    """
    sensitivity, value = mechanism.sensitivity, mechanism.sensitivity.value
    if _checks.is_traced(value):
        enough = value >= jnp.asarray(needed, jnp.result_type(value))
        return jax.tree.map(lambda leaf: _or_nan(enough, leaf), mechanism) if needed else mechanism
    # NumPy is needed here: inside of `jit`, JAX traces comparisons even of concrete arrays.
    least = float(np.min(np.asarray(value)))
    if not least * _TO_NEAREST >= needed:
        raise ValueError(
            "sensitivity is too small for this target: one record may change its value by "
            f"{needed!r} in {norm_name(sensitivity.norm)} under {sensitivity.relation}, but the "
            f"noise of the mechanism is for a sensitivity of {least!r}: make the mechanism with "
            "target.sensitivity(...)"
        )
    return mechanism


def plan_of(target: Target, mechanism: Mechanism) -> Inside:
    """How a mechanism releases a target.

    How a target is released. For a query, noise may be added to the value of another function, such
    as sums of integers. Then the query maps the noisy value to the published value.
    """
    known = knowing(target)
    if known is None:
        return Inside(target, mechanism)
    if mechanism.sensitivity.inside:
        sensitivity = dataclasses.replace(mechanism.sensitivity, inside=False)
        mechanism = changed(mechanism, sensitivity=sensitivity)
    found = known._inside(mechanism)
    return dataclasses.replace(found, target=target) if found.target is known else found


def knowing(target: object) -> KnowsSensitivity | None:
    """Unwraps a query or another target that knows its sensitivity; None for other functions."""
    if isinstance(target, Unchanging):
        return knowing(target.function)
    if type(target) is _COMPILED:
        return knowing(getattr(target, "__wrapped__", None))
    if inspect.ismethod(target) and target.__name__ == "__call__":
        return knowing(target.__self__)
    return target if isinstance(target, KnowsSensitivity) else None


def _or_nan(enough: jax.Array, leaf: jax.Array | float) -> jax.Array | float:
    """A number of a mechanism; NaN if its noise would be too small."""
    is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.where(enough, leaf, jnp.nan) if is_float else leaf
