"""Checks that the noise of a mechanism is large enough for a target of known sensitivity.

The guarantee of a mechanism is valid for pairs of values that differ by at most the mechanism's
sensitivity. If one record could change the target by more than that, the guarantee of the release
would be false. The checks in this file depend only on public facts.
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
# The bound `needed` was rounded up. A user may pass the same bound rounded to nearest, which is
# smaller than `needed` by at most this factor. The user's bound is accepted, because the scale of
# the noise is rounded up by more than this factor.
_TO_NEAREST = 1 + 2.0**-50
_COMPILED = type(jax.jit(lambda: None))


def check_maker(target: Target, sensitivity: Sensitivity) -> None:
    """Raises an error if a query made the sensitivity, but the target has no known sensitivity."""
    if sensitivity.records is None and sensitivity.known_by and knowing(target) is None:
        raise ValueError(
            f"sensitivity was made by a {sensitivity.known_by}, but the target is another function:"
            f" release the {sensitivity.known_by} itself, on the columns that it needs. For a"
            " function of your own, prove a bound by dpjax.prove_sensitivity, or state a bound by"
            " dpjax.assume_sensitivity"
        )


def needed(target: Target, sensitivity: Sensitivity, records: TreeSpec) -> float:
    """Returns the target's known sensitivity, in the norm and relation of `sensitivity`.

    For a sampled or proved sensitivity the result is 0, because `privatize` checks these by
    comparing traced programs instead. A sampled sensitivity may be smaller than the known one. Its
    guarantee states gamma: the fraction of pairs of databases whose values may differ by more than
    the sampled sensitivity.

    Returns:
        The sensitivity, rounded up; 0 if no sensitivity is known, so that noise of any scale is
        accepted.

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
            f"sensitivity is in {norm_name(norm)} under {relation}, but a {type(known).__name__}"
            f" knows its sensitivity only in {', '.join(norms)} under {' or '.join(relations)}: use"
            " one of these. To use your own bound, wrap the target in a function: lambda database:"
            " target(database)"
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
        The mechanism itself. If its sensitivity is traced and too small, all floats of the returned
        mechanism are NaN.

    Raises:
        ValueError: if the sensitivity is concrete and too small.
    """
    sensitivity, value = mechanism.sensitivity, mechanism.sensitivity.value
    if _checks.is_traced(value):
        enough = value >= jnp.asarray(needed, jnp.result_type(value))
        return jax.tree.map(lambda leaf: _or_nan(enough, leaf), mechanism) if needed else mechanism
    # The comparison uses NumPy, because inside `jit`, JAX traces comparisons even of concrete
    # arrays.
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
    """Returns the function to which noise is added, and the mechanism that adds it.

    For a query, this function may differ from the query itself. It may return sums of integers, for
    example. The query then maps the noisy sums to the published value.
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
    """Returns the query or other target that knows its sensitivity; None for other functions.

    Looks inside `jax.jit`, bound methods `__call__` and cached programs.
    """
    if isinstance(target, Unchanging):
        return knowing(target.function)
    if type(target) is _COMPILED:
        return knowing(getattr(target, "__wrapped__", None))
    if inspect.ismethod(target) and target.__name__ == "__call__":
        return knowing(target.__self__)
    return target if isinstance(target, KnowsSensitivity) else None


def _or_nan(enough: jax.Array, leaf: jax.Array | float) -> jax.Array | float:
    """Returns `leaf`, but NaN if there is not enough noise and `leaf` is a float."""
    is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.where(enough, leaf, jnp.nan) if is_float else leaf
