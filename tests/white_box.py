"""Every intermediate value of a program stays within its abstract value, on pairs of neighbors."""

import jax
import numpy as np

from all_pairs import traced
from dpjax.proving import _prove_sensitivity
from dpjax.proving._exact_programs import with_sums
from dpjax.proving._losses import _evaluate
from dpjax.proving._value import RefusalError


def check_every_step(target, spec, bounds, database, neighbor, place=None):
    """Whether the program is proved, as it is or with exact sums.

    Pair k of the databases differs in record `place[k]`. Without places, no bound is checked that
    distinguishes the changed row.
    """
    jaxpr, program, public = traced(target, spec, bounds)
    sums = {}
    proved = _check(jaxpr, program, public, sums, (database, neighbor), place)
    if sums:
        exact = with_sums(public, sums)
        program = _prove_sensitivity.traced(target, spec, exact)
        jaxpr = _prove_sensitivity._after_the_clamp(program, spec, exact)
        proved |= _check(jaxpr, program, exact, {}, (database, neighbor), place)
    return proved


def _check(jaxpr, program, public, sums, pair, place):
    try:
        walk, _ = _prove_sensitivity._walk(jaxpr, program, public, sums)
    except RefusalError:
        return False
    keys = [step.key for step in walk.steps]

    @jax.jit
    @jax.vmap
    def values(x):
        found = {}
        inputs = [(x, None)] * len(jaxpr.invars)
        _evaluate(jaxpr, program.jaxpr.consts, inputs, (), found, {})
        return [found.get(key) for key in keys]

    for step, a, b in zip(walk.steps, *map(values, pair), strict=True):
        if a is not None:
            _check_step(step, np.asarray(a, float), np.asarray(b, float), place)
    return True


def _check_step(step, a, b, place):
    x = step.value
    if np.isnan(x.low).any():  # A constant NaN, which a later choice replaces.
        np.testing.assert_array_equal(a, b)
        return
    for one in (a, b):
        numbers = np.nan_to_num(one, nan=np.broadcast_to(x.low, one.shape))
        assert (x.low <= numbers).all(), step
        assert (numbers <= x.high).all(), step
        assert x.nan or not np.isnan(one).any(), step
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    each = np.maximum(x.changed.each, x.others.each)
    assert (same | (each > 0)).all(), step
    moves = np.nan_to_num(np.abs(a - b))
    assert (moves <= each).all(), step
    n = 1 if x.axis is None else x.n - 1
    rows = moves.reshape(len(moves), -1)
    assert rows.sum(1).max(initial=0) <= x.changed.l1 + n * x.others.l1, step
    if x.axis is None:
        assert np.sqrt((rows**2).sum(1)).max(initial=0) <= x.changed.l2, step
    elif place is not None:
        changed = np.arange(x.n) == np.asarray(place)[:, None]
        _check_rows(step, np.moveaxis(moves, x.axis + 1, 1), changed)


def _check_rows(step, moves, changed):
    """The row of the changed record is within `changed`, and every other row is within `others`."""
    x = step.value
    for bound, rows in ((x.changed, moves[changed]), (x.others, moves[~changed])):
        each = np.broadcast_to(bound.each, x.shape)
        each = np.moveaxis(each, x.axis, 0).max(0)
        flat = rows.reshape(len(rows), -1)
        assert (rows <= each).all(), step
        assert flat.sum(1).max(initial=0) <= bound.l1, step
        assert np.sqrt((flat**2).sum(1)).max(initial=0) <= bound.l2, step
        assert (flat > 0).sum(1).max(initial=0) <= bound.count, step
