"""Quantiles of a histogram: selects an edge for each recursively, then measures the ranks of edges.

docs/proofs/quantiles.md has the proof and the reasons for the shares of epsilon.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, Value
from dpjax._core._values import Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax.mechanisms._additive import AdditiveMechanism, laplace
from dpjax.mechanisms._selection import SelectionMechanism, log_prob_of_index, permute_and_flip
from dpjax.mechanisms._start import begin
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import LAPLACE
from dpjax.random._release import add_noise
from dpjax.random._selected_index import permute_and_flip_index
from dpjax.release._mechanism import SensitivityMechanism

# The fraction of epsilon that pays for selecting edges, for one quantile and for several. The rest
# pays for the counts around these edges. docs/proofs/quantiles.md compares fractions.
_SEARCH_ONE, _SEARCH = 1 / 2, 1 / 3
# This factor covers the rounding of noise scales to float32, and costs almost no accuracy.
_OUTWARD = 1 + 2.0**-20
# A score below -_WORST is replaced by -_WORST. At a node with `share` a / b, the score of an edge
# is -b times the number of ranks between the edge and the wanted rank. So an edge whose score is
# replaced is at least 10^6 ranks away.
_WORST = 2**30
_LEAST_LARGEST = 1000  # A denominator b up to this number is allowed for any capacity.
# Thresholds lie on both sides of a selected edge, at growing distances from it. On each side, the
# distances of the first `_NEAR` thresholds grow by a factor of 2. The distances of the other
# thresholds grow by a factor of `_GROWTH`.
_NEAR, _GROWTH = 5, 4


class Node(NamedTuple):
    """One step of the recursive search: a quantile, searched for between two other quantiles.

    Attributes:
        at: its index among all quantiles, from 1.
        left: the index of the quantile below; 0 for the lower end of the grid.
        right: the index of the quantile above.
        share: the fraction of the records between these two quantiles that should be below this
            quantile, a rational number.
    """

    at: int
    left: int
    right: int
    share: Fraction


class Ranks(NamedTuple):
    """The numbers that a `RankSearch` releases.

    Attributes:
        edges: the index of the edge that was found for each quantile, int32.
        counts: noisy counts of the cells between the thresholds around these edges, int32.
    """

    edges: jax.Array
    counts: jax.Array


@frozen_pytree
class RankSearch(SensitivityMechanism):
    """Finds quantiles in a histogram and counts the records around them; made by `rank_search`.

    The value is an integer array of counts, of shape (..., cells). Leading axes are for groups.

    Attributes:
        sensitivity: a bound on the total change of all counts by one record (the norm l1).
        epsilon: the epsilon of the guarantee.
        probabilities: the probabilities of the quantiles, increasing, in (0, 1).
        capacity: a bound on the number of records, public.
        nearest: the distance, in cells, from a selected edge to the nearest thresholds on both
            sides of it. Records are counted between consecutive thresholds.

    Formal guarantees:
        See `rank_search`.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    probabilities: tuple[Fraction, ...] = static()
    capacity: int = static()
    nearest: int = static(default=1)

    @property
    def nodes(self) -> list[Node]:
        """Returns the quantiles in the order of selection: the middle one, then each side."""
        ends = (Fraction(0), *self.probabilities, Fraction(1))
        largest = max(_LEAST_LARGEST, _WORST // self.capacity)
        found: list[Node] = []

        def search(left: int, right: int) -> None:
            if right - left < 2:
                return
            at = (left + right) // 2
            share = (ends[at] - ends[left]) / (ends[right] - ends[left])
            found.append(Node(at, left, right, share.limit_denominator(largest)))
            search(left, at)
            search(at, right)

        search(0, len(ends) - 1)
        return found

    @property
    def _search(self) -> float:
        return _SEARCH_ONE if len(self.probabilities) == 1 else _SEARCH

    def selection(self, node: Node) -> SelectionMechanism:
        """Returns the mechanism that selects the edge of one quantile.

        At each level of the recursion, a record is counted in only one search. So the epsilon of
        the search is divided by the number of levels, which is about log2(number of quantiles).
        """
        a, b = node.share.as_integer_ratio()
        reach = self.sensitivity.value * max(a, b - a)
        of_scores = dataclasses.replace(self.sensitivity, norm="linf", value=reach)
        levels = len(self.probabilities).bit_length()
        return permute_and_flip(of_scores, self.epsilon * (self._search / levels))

    @property
    def measurement(self) -> AdditiveMechanism:
        """Returns the mechanism that adds noise to the counts between thresholds."""
        return laplace(self.sensitivity, self.epsilon * (1 - self._search))

    def _check_value(self, value: Value) -> None:
        one_array = jax.tree_util.all_leaves([value]) and value.ndim >= 1 and value.shape[-1] >= 2
        if not one_array or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                "value must be counts of at least two cells, integers of shape (..., cells), got"
                f" {_checks.described(value)}"
            )
        for node in self.nodes:
            self.selection(node)._check_value(_scores_like(value))
        self.measurement._check_value(jax.ShapeDtypeStruct(value.shape, jnp.int32))

    def clamped(self, value: Value) -> jax.Array:
        """Converts the counts to int32, clamped to [0, capacity], as the mechanism uses them.

        Args:
            value: integers of shape (..., cells).

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        counts = _checks.saturating_cast(_checks.real_arrays("value", value), jnp.int32)
        return jnp.clip(counts, 0, self.capacity)

    def _draw(self, key: Key, value: Value) -> Ranks:
        counts = self.clamped(value)
        cells = counts.shape[-1]
        below = _counts_below(counts).reshape(-1, cells + 1)
        search, count = jax.random.split(key)
        keys = jax.random.split(search, len(below))
        edges = jax.vmap(self._found)(keys, below)
        between = _between(below, thresholds(edges, cells, self.nearest))
        like = jax.ShapeDtypeStruct(between.shape, jnp.int32)
        noisy = add_noise(count, between, self.measurement._calibration(like), LAPLACE)
        shape = counts.shape[:-1]
        return Ranks(edges.reshape(*shape, -1), noisy.reshape(*shape, -1))

    def _found(self, key: Key, below: jax.Array) -> jax.Array:
        """Selects the edge of each quantile, given the number of records below every edge."""
        nodes, cells = self.nodes, len(below) - 1
        calibrations = [self._calibration(node, below) for node in nodes]

        def select(edges: jax.Array, step: Any) -> tuple[jax.Array, None]:
            key, (at, left, right, a, b), calibration = step
            # Edges outside of the segment from `left` to `right` are excluded. They could make
            # segments overlap, and a record in two segments would cost twice.
            scores, outside = _scores_between(below, edges[left], edges[right], a, b)
            edge = permute_and_flip_index(key, scores, calibration, taken=outside)
            return edges.at[at].set(edge), None

        start = jnp.zeros(len(nodes) + 2, jnp.int32).at[-1].set(cells) + 0 * below[0]
        stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *calibrations)
        steps = jax.random.split(key, len(nodes)), _plan(nodes), stacked
        return lax.scan(select, start, steps)[0][1:-1]

    def _calibration(self, node: Node, below: jax.Array) -> Calibration:
        calibration = self.selection(node)._calibration(_scores_like(below))
        # A changed record may change the scores in `segments` segments. Each of them is charged for
        # the errors of the tables from which its noise is drawn.
        segments = jnp.maximum(self.sensitivity.value, 1.0)
        return dataclasses.replace(
            calibration, scale=calibration.scale * _OUTWARD, coordinates=2 * segments
        )

    def log_prob(self, output: Ranks, value: Value) -> jax.Array:
        counts = self.clamped(value)
        below = _counts_below(counts).reshape(-1, counts.shape[-1] + 1)
        edges = jnp.asarray(output.edges).reshape(len(below), -1)
        noisy = jnp.asarray(output.counts).reshape(len(below), -1)
        between = _between(below, thresholds(edges, counts.shape[-1], self.nearest))
        found = jax.vmap(self._log_prob_of_edges)(edges, below)
        return jnp.sum(found) + self.measurement.log_prob(noisy, between)

    def _log_prob_of_edges(self, edges: jax.Array, below: jax.Array) -> jax.Array:
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), edges, jnp.array([len(below) - 1])])
        total = jnp.zeros(())
        for node in self.nodes:
            a, b = node.share.as_integer_ratio()
            scores, outside = _scores_between(below, ends[node.left], ends[node.right], a, b)
            selection = self.selection(node)
            logits = selection._logits(scores, selection._calibration(scores))
            log_pmf = selection.rule.log_pmf(jnp.where(outside, -jnp.inf, logits))
            total += log_prob_of_index(log_pmf, ends[node.at])
        return total

    def facts(self, cells: int) -> dict[str, Any]:
        """Returns public numbers from which intervals and estimates are computed."""
        spread = [0.0] * (len(self.probabilities) + 2)
        # Later searches are for quantiles between two edges that were selected earlier. So an error
        # of one of these edges shifts the edges that later searches select.
        for node in self.nodes:
            share, selection = float(node.share), self.selection(node)
            # A shift by one rank changes a score by `denominator`. So the noise scale of the
            # selection, in ranks, is 2 * sensitivity / (epsilon * denominator).
            a_rank = float(selection.epsilon) * node.share.denominator
            own = math.sqrt(2) * (2 * float(selection.sensitivity.value) / a_rank)
            inherited = (1 - share) * spread[node.left], share * spread[node.right]
            spread[node.at] = math.hypot(own, *inherited)
        like = jax.ShapeDtypeStruct((cells,), jnp.int32)
        return {
            "scale": float(self.measurement.effective_scale(like=like)),
            "searched": [float(p) for p in self.probabilities],
            "spread": spread[1:-1],
            "cells": cells,
            "nearest": self.nearest,
        }


def rank_search(
    sensitivity: Sensitivity,
    epsilon: Scalar,
    *,
    probabilities: tuple[Fraction, ...],
    capacity: int,
    nearest: int = 1,
) -> RankSearch:
    """Finds quantiles in a histogram by selections, then counts the records around them.

    Args:
        sensitivity: the sensitivity of all counts, in the norm l1.
        epsilon: finite, above 0.
        probabilities: the probabilities of the quantiles, increasing, in (0, 1).
        capacity: a bound on the number of records, public.
        nearest: the distance, in cells, from a selected edge to the nearest thresholds on both
            sides of it. Records are counted between consecutive thresholds.

    Returns:
        A `RankSearch`, which releases `Ranks`.

    Raises:
        TypeError: if epsilon is not a number.
        ValueError: if epsilon is out of range, or the sensitivity in another norm.

    Formal guarantees:
        epsilon-DP for histograms that differ by at most the sensitivity in l1, by the proof in
        docs/proofs/quantiles.md. The guarantee is exact given uniform random bits.

    Source:
        Kaplan, Schnapp and Stemmer (2022), for the recursion; Smith (2011) for the scores.
    """
    sensitivity, epsilon = begin("l1", sensitivity, epsilon)
    # Counts and their sums are int32.
    capacity = _checks.integer("capacity", capacity, least=1, most=2**29)
    return RankSearch(sensitivity, epsilon, probabilities, capacity, nearest)


def thresholds(edges: Any, cells: int, nearest: int) -> Any:
    """Returns both ends of the grid, the selected edges, and edges at growing distances from them.

    Args:
        edges: shape (..., quantiles), NumPy or JAX.
        cells: the number of cells, which is the index of the last edge.
        nearest: the smallest distance, in cells.

    Returns:
        An array of the same kind, of shape (..., thresholds). Its last axis is sorted, and some of
        its numbers may be equal.
    """
    xp = np if isinstance(edges, np.ndarray) else jnp
    away = _distances(cells, nearest)
    offsets = np.concatenate([-away, [0], away]).astype(np.int32)
    offsets = offsets.reshape((1,) * edges.ndim + (-1,))
    near = xp.clip(edges[..., None] + offsets, 0, cells)
    near = near.reshape(*edges.shape[:-1], -1)
    ends = xp.zeros((*edges.shape[:-1], 1), np.int32)
    return xp.sort(xp.concatenate([ends, near, ends + np.int32(cells)], axis=-1), axis=-1)


def _distances(cells: int, nearest: int) -> np.ndarray:
    """Returns the distances, in cells, of thresholds from a selected edge.

    All of them are less than `cells`.
    """
    found = nearest * 2 ** np.arange(_NEAR)
    while found[-1] * _GROWTH < cells:
        found = np.append(found, found[-1] * _GROWTH)
    return found[found < cells]


def _counts_below(counts: jax.Array) -> jax.Array:
    """Returns how many records are below each edge, int32."""
    none = jnp.zeros((*counts.shape[:-1], 1), jnp.int32)
    return jnp.concatenate([none, jnp.cumsum(counts, axis=-1, dtype=jnp.int32)], axis=-1)


def _between(below: jax.Array, edges: jax.Array) -> jax.Array:
    """Returns how many records are between consecutive thresholds."""
    return jnp.diff(jnp.take_along_axis(below, edges, axis=-1), axis=-1)


def _scores_between(
    below: jax.Array, left: jax.Array, right: jax.Array, a: Any, b: Any
) -> tuple[jax.Array, jax.Array]:
    """Scores how well each edge divides the records between `left` and `right`.

    Let r be the number of records between `left` and the edge, and c the number of records between
    `left` and `right`. The score of the edge is -|b r - a c|, so it is highest if r / c is nearest
    to a / b. The function also returns which edges are not between `left` and `right`.
    """
    places = jnp.arange(len(below), dtype=jnp.int32)
    inside = jnp.clip(below, below[left], below[right]) - below[left]
    wanted = _product(a, below[right] - below[left])
    away = _limbs.subtract(_product(b, inside), wanted)
    # Clamping cannot increase the sensitivity of a score.
    scores = -jnp.abs(_limbs.to_integers(_limbs.clip(away, _WORST), jnp.int32))
    return scores, (places < left) | (places > right)


def _product(factor: Any, ranks: jax.Array) -> _limbs.Limbs:
    """Multiplies two int32 numbers exactly, in 64 bits."""
    return _limbs.multiply(*map(_limbs.from_integers, (jnp.asarray(factor, jnp.int32), ranks)))


def _scores_like(counts: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((counts.shape[-1],), jnp.int32)


def _plan(nodes: list[Node]) -> tuple[jax.Array, ...]:
    rows = [(*node[:3], *node.share.as_integer_ratio()) for node in nodes]
    return tuple(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
