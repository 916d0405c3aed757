"""Programs that XLA compiles into others, in 2026: no proof may take them for what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import dynamic_slice_p

import dpjax
from dpjax.proving import NoProofError

N = 3
RECORDS = jax.ShapeDtypeStruct((N, 1), jnp.float32)
TABLE = np.arange(12, dtype=np.float32) * 10


def bound(target, records=RECORDS):
    return dpjax.prove_sensitivity(target, records, bounds=(0, 9), norm="l1").value


def pad(x, before=1, after=1):
    return jnp.pad(x, ((0, 0), (before, after)))


def pooled(x, window, start, reduce):
    start = np.array(start, x.dtype)
    return lax.reduce_window(x, start, reduce, window, (1, 1), ((0, 0), (1, 0)))


def beside(x, other):
    """x, but seen as rows of the records."""
    return jnp.concatenate([x, other], 1)[:, :1]


SURROUNDED = {
    "padding": lambda x: jnp.cumsum(pad(x), 1),
    "more padding": lambda x: jnp.cumsum(pad(x, 2, 2), 1),
    "from the end": lambda x: lax.cumsum(pad(x), 1, reverse=True),
    "a window": lambda x: pooled(pad(x), (1, 2), 0, lax.add),
    "a maximum": lambda x: pooled(
        jnp.pad(x.astype(int), ((0, 0), (1, 1)), constant_values=-(2**31)), (1, 2), -(2**31),
        lax.max,
    ),
    "one side, then the other": lambda x: jnp.cumsum(pad(pad(x, 0, 1), 1, 0), 1),
    "around the records": lambda x: jnp.cumsum(jnp.pad(x.sum(0), (1, 1))),
    "joined": lambda x: jnp.cumsum(jnp.concatenate([0 * x, x, 0 * x], 1), 1),
    "a mask": lambda x: jnp.cumsum(x * np.array([[0, 1, 0]], np.float32), 1),
    "an integer": lambda x: jnp.cumsum(pad(x.astype(int)).astype(float), 1),
    "a sum of one": lambda x: jnp.cumsum(pad(x)[:, :, None].sum(2), 1),
    "up and down": lambda x: jnp.cumsum((pad(x) + 1000) - 1000, 1),
    "public": lambda x: x + jnp.cumsum(pad(jnp.cos(jnp.ones((1, 1)))), 1),
    "a product": lambda x: jnp.cumprod(jnp.pad(x, ((0, 0), (1, 1)), constant_values=1.0), 1),
    "as rows": lambda x: jnp.cumsum(
        beside((jnp.pad(x[:1], ((1, 1), (0, 0))) + 1000) - 1000, x), 0
    ),
}  # fmt: skip


def computed(place, dtype=jnp.int32):
    """A public place that XLA does not know before it joins slices."""
    return jnp.arange(3, dtype=dtype).max() - jnp.array(2, dtype) + jnp.array(place, dtype)


def part(array, place, size=5, dtype=jnp.int32):
    return dynamic_slice_p.bind(array, computed(place, dtype), slice_sizes=(size,))


def looked_up(x, index, mode):
    return part(TABLE, 4).at[index].get(mode=mode) + x[0, 0]


def as_integers(x):
    """Integers in three places, for which XLA knows that x - x is 0."""
    return jnp.broadcast_to(x.astype(int), (N, 3))


def halves(x):
    return x.astype(float) * 0.5


def always(x):
    """True, which XLA knows for integers, but neither ranges nor cells show."""
    other = x[:, ::-1]
    return x + other - other == x


def first(x):
    return jnp.pad(x[:, :1], ((0, 0), (1, 1)))


def between(x, end):
    ends = jnp.broadcast_to(end[None], x.shape)
    return jnp.concatenate([ends, jnp.concatenate([x, ends], 1)], 1)


# What XLA takes away, so that padding is left, or numbers that it takes for padding.
HIDDEN = {
    "a choice": lambda x: jnp.where(always(x), first(x), 1),
    "a choice of floats": lambda x: jnp.where(x == x + 0, first(x.astype(float)), 0.001),
    "an order": lambda x: jnp.where(jnp.abs(halves(x)) >= 0, first(halves(x)), 0.001),
    "a difference": lambda x: jnp.where(x - x == 0, first(x), 1),
    "there and back": lambda x: first(x) + x - x,
    "of what is one": lambda x: x - (x - first(x)),
    "a variance": lambda x: between(
        halves(x)[:, :1], jnp.var(jnp.where(always(x), *np.float32([0.25, 0.75])), axis=0)[:1]
    ),
    "joined": lambda x: between(x[:, 1:2], x[0, :1] - x[0, :1]),
    "windows of one": lambda x: jnp.where(
        always(x), lax.reduce_window(x[:, :1], 0, lax.add, (1, 1), (1, 1), ((0, 0), (1, 1))), 1
    ),
    "a row": lambda x: jnp.where(x[:1] + 0 == x[:1], jnp.pad(x[:1, :1], ((0, 0), (1, 1))), 1),
    "of truth": lambda x: jnp.where(always(x), (first(x > 3) != np.array(False)).astype(int), 1),
    "in a loop": lambda x: lax.scan(lambda c, r: (c * 1, r), first(x) + x - x, jnp.zeros(3000))[0],
    "within a loop": lambda x: lax.scan(
        lambda c, r: (c * 1, jnp.sign(jnp.cumsum(c, 1))), first(x) + x - x, jnp.zeros(1000)
    )[1].sum(0),
}


def one_number(a, b):
    """Public numbers that XLA knows to be one after a step that its folding of constants is not."""
    shape = (N, 1)
    return jnp.where(jnp.ones(shape, bool), jnp.full(shape, a), jnp.full(shape, b))


CUT = {
    "a choice": lambda x: x * jnp.cumsum(one_number(0.3, 0.7).astype(int).astype(float), 0),
    "of 8 bits": lambda x: x * jnp.cumsum(one_number(0.3, 0.7).astype(jnp.int8).astype(float), 0),
    "by a record": lambda x: x * jnp.cumsum(
        jnp.where(x.astype(int) == x.astype(int), 0.3, 1.7).astype(int).astype(float), 0
    ),
    "by a sign": lambda x: x * jnp.cumsum(
        jnp.where(jnp.sin(x) * jnp.sin(x) >= 0, 0.3, 1.7).astype(int).astype(float), 0
    ),
    "a window": lambda x: x * lax.reduce_window(
        one_number(0.3, 0.7).astype(int).astype(float), 0.0, lax.add, (N, 1), (1, 1),
        ((N - 1, 0), (0, 0)),
    ),
}  # fmt: skip

ZEROS = np.zeros((N, 1), np.float32)
CROSSING = {
    "public": lambda x: x * jnp.maximum(1.0, lax.clamp(1.0, x, -100.0)),
    "private": lambda x: x + jnp.maximum(ZEROS, lax.clamp(ZEROS, x, -50 * x)),
    "integers": lambda x: x.astype(int) + jnp.maximum(
        ZEROS.astype(int), lax.clamp(ZEROS.astype(int), x.astype(int), -50 * x.astype(int))
    ),
    "at one place": lambda x: x * lax.clamp(
        np.ones((N, 1), np.float32), x, np.array([[1], [0], [1]], np.float32)
    ),
}  # fmt: skip

AT_ONE_PLACE = {
    "a number": lambda x: jnp.zeros(3).at[jnp.ones(1, int)].add(x[:, 0])[None],
    "a row": lambda x: jnp.zeros((3, 1)).at[jnp.ones(1, int)].add(x).T,
    "a private place": lambda x: jnp.zeros(3).at[0 * x[:, 0].astype(int) + 1].add(x[:, 0])[None],
    "then moved": lambda x: (2 * jnp.zeros(3).at[jnp.ones(1, int)].add(x[:, 0]))[None] / 2,
    "in a loop": lambda x: lax.scan(
        lambda c, r: (c + jnp.zeros(3).at[jnp.zeros(1, int)].add(r), None), jnp.zeros(3), x
    )[0][None],
}

BEYOND = {
    "a slice of a slice": lambda x: part(part(jnp.append(TABLE, x), 4), 9, 2),
    "before the start": lambda x: part(part(jnp.append(TABLE, x), 4), -9, 2),
    "the first slice": lambda x: part(part(jnp.append(TABLE, x), 14), 1, 2),
    "a place of a slice": lambda x: part(jnp.append(TABLE, x), 14)[computed(3)],
    "a table that is clipped": lambda x: looked_up(x, (20 * x[0, 0]).astype(int), "clip"),
    "a public place that is clipped": lambda x: looked_up(x, computed(7), "clip"),
    "places of 8 bits": lambda x: part(
        part(jnp.append(jnp.arange(250.0), x), 100, 153, jnp.int8), 120, 33, jnp.int8
    ),
}


@pytest.mark.parametrize("program", SURROUNDED)
def test_one_place_between_zeros_is_not_summed(program):
    """XLA takes each sum for the place itself, also where it holds zeros alone."""
    with pytest.raises(NoProofError, match=r"one entry|only one entry along"):
        bound(SURROUNDED[program])


@pytest.mark.parametrize("program", HIDDEN)
def test_padding_behind_what_xla_takes_away_is_not_summed(program):
    """Ranges do not show the zeros: for them, any choice may be made, and any integer be left."""
    with pytest.raises(NoProofError, match=r"one entry|only one entry along"):
        bound(lambda x: jnp.cumsum(HIDDEN[program](as_integers(x)), 1))


@pytest.mark.parametrize("program", CUT)
def test_sums_of_public_numbers_that_were_cut_are_refused(program):
    """XLA multiplies .3 by 1, 2, 3, where the program adds up int(.3): the value was public."""
    with pytest.raises(NoProofError, match="truncated to integers"):
        bound(lambda x: x + CUT[program](x))


@pytest.mark.parametrize("program", CROSSING)
def test_bounds_of_a_clamp_do_not_cross(program):
    """XLA takes max(low, clamp(low, x, high)) for the clamp, which is high where that is less."""
    with pytest.raises(NoProofError, match="may exceed its upper bound"):
        bound(CROSSING[program])


@pytest.mark.parametrize("pads", [(-1, 2), (1, -1)])
def test_convolutions_with_negative_padding_are_refused(pads):
    """XLA on a CPU computes some of them from other numbers: places that are cut, and others."""
    rows = jax.ShapeDtypeStruct((N, 3, 1), jnp.float32)
    kernel = jnp.ones((2, 1, 1))
    with pytest.raises(NoProofError, match="negative padding"):
        bound(
            lambda x: lax.conv_general_dilated(
                x, kernel, (1,), (pads,), dimension_numbers=("NWC", "WIO", "NWC")
            ),
            rows,
        )


@pytest.mark.parametrize("program", AT_ONE_PLACE)
def test_a_number_at_one_place_is_not_summed(program):
    """XLA takes it for padding, where a program adds one number and XLA knows its place."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    for window in ((1, 3), (1, 2)):
        with pytest.raises(NoProofError, match=r"one entry|depends on one record"):
            bound(lambda x, w=window: pooled(AT_ONE_PLACE[program](x), w, 0, lax.add), one)


@pytest.mark.parametrize("program", BEYOND)
def test_a_place_beyond_a_slice_is_refused(program):
    """XLA adds the places of two slices, and so reads what lies beside the first one."""
    with pytest.raises(NoProofError, match=r"out of bounds|Use int32|are public"):
        bound(BEYOND[program])


def moved_by(target):
    """The largest distance between records 9 and 0, in each place of three."""
    run, zeros = jax.jit(target), jnp.zeros(RECORDS.shape)
    pairs = (zeros.at[i].set(9) for i in range(N))
    return max(float(np.abs(run(x) - run(zeros)).sum()) for x in pairs)


@pytest.mark.parametrize(
    "target",
    [
        lambda x: jnp.cumsum(pad(x, 1, 0), 1),
        lambda x: jnp.cumsum(pad(x, 1, 2), 1),
        lambda x: jnp.cumsum(jnp.concatenate([0 * x, x, 0 * x + 1], 1), 1),
        lambda x: pad(x).sum(1),
        lambda x: jnp.cumsum(jnp.stack([x[:, 0], x[:, 0] / 2, x[:, 0]], 1), 1),
        lambda x: jnp.cumsum(jnp.where(x > np.array([[1, 2, 3]], np.float32), 1.0, 0.0), 1),
        lambda x: jnp.cumsum(jnp.stack([(x > t).sum() for t in (2, 4, 6)])),
        lambda x: jnp.cumsum(jnp.zeros(5).at[(x[:, 0] / 2).astype(int)].add(1.0)),
        lambda x: jnp.cumsum(x.astype(int).astype(float), 0),
        lambda x: jnp.cumsum(jnp.floor(one_number(1.3, 0.7)) * x, 0),
        lambda x: jnp.maximum(1.0, lax.clamp(1.0, x, 2.0 + x)),
        lambda x: part(part(jnp.append(TABLE, x), 8, 7), 2, 5),
        lambda x: part(TABLE, 4)[jnp.clip(x[:, 0].astype(int), 0, 4)],
    ],
)
def test_what_xla_compiles_rightly_is_proved(target):
    found = bound(target)
    assert 0 < moved_by(target) <= found * (1 + 1e-6)
    assert found < 8 * 9
