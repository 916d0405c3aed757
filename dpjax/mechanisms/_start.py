"""Argument checks shared by all factory functions of mechanisms, and helpers for pytrees."""

import math
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import PyTree, Value
from dpjax._core._values import NoiseKind, Norm, Scalar, Sensitivity, norm_name
from dpjax._exact._numerics import outward
from dpjax.sensitivity._norms import check_norm, norm_function


def check_noise(noise: NoiseKind) -> bool:
    """Whether the argument `noise` asks for exact noise; refuses invalid values."""
    return _checks.choice("noise", noise, get_args(NoiseKind)) == "exact"


def begin(
    norm: Norm, sensitivity: Sensitivity | Scalar, epsilon: Scalar
) -> tuple[Sensitivity, Scalar]:
    """Checks the sensitivity and epsilon of a mechanism, and returns both.

    If the sensitivity is a number, it counts as a bound for all databases. The neighboring relation
    is then the relation of the open ledger, or replace-one if no ledger is open. If a traced
    sensitivity is NaN, epsilon becomes NaN, too, so that the guarantee shows the error.
    """
    norm_function(norm)
    epsilon = _checks.positive("epsilon", epsilon)
    if callable(getattr(sensitivity, "sensitivity", None)):
        raise TypeError(
            f"sensitivity must be a Sensitivity or a number, got a {type(sensitivity).__name__}:"
            " call its method `sensitivity`, and pass the result"
        )
    if not isinstance(sensitivity, Sensitivity):
        bound, relation = _checks.positive("sensitivity", sensitivity), relation_or_inherited(None)
        sensitivity = Sensitivity(bound, 0.0, 1.0, norm, None, relation)
    if sensitivity.norm != norm:
        raise ValueError(
            f"sensitivity must be in the norm {norm_name(norm)}, got a sensitivity in the norm"
            f" {norm_name(sensitivity.norm)}: pass norm={norm_name(norm)!r} to"
            " dpjax.sample_sensitivity, or to the method `sensitivity` of the target"
        )
    check_norm(sensitivity)
    check = _checks.non_negative if sensitivity.zero_allowed else _checks.positive
    value = check("sensitivity", sensitivity.value)
    if _checks.is_traced(value):
        epsilon = jnp.where(jnp.isnan(value), jnp.nan, outward(epsilon, math.inf))
    return sensitivity, epsilon


def count(shape: tuple[int, ...]) -> int:
    """Returns the number of entries of an array of this shape. Refuses a shape with a 0."""
    return math.prod(_checks.integer("shape", size, least=1) for size in tuple(shape))


def sum_over_leaves(function: Callable[..., jax.Array], *trees: PyTree) -> jax.Array:
    """Applies a function to corresponding leaves of pytrees, and sums the results."""
    terms = jax.tree.leaves(jax.tree.map(function, *trees))
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    return jnp.sum(jnp.stack([term.astype(widest) for term in terms]))


def check_one_array(value: Value, wanted: str, rank: int = 1) -> None:
    """Raises an error if the value is not one array of this rank; `wanted` is for the message."""
    if not jax.tree_util.all_leaves([value]) or value.ndim != rank:
        raise ValueError(
            f"value must be one array of {wanted}, got"
            f" {jax.tree.map(lambda leaf: leaf.shape, value)}: use jax.vmap for a batch"
        )
