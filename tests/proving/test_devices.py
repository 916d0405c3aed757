"""What compilers and devices do to numbers, and proofs must count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import dynamic_slice_p

import dpjax
from accelerators.exactness import elementary_errors
from dpjax.proving import NoProofError
from dpjax.release import _privatize

N = 2
FLOATS = jax.ShapeDtypeStruct((N,), jnp.float32)
# A compiler takes (x - 1e5) - .124 to x - 100000.125, which is 0 at the lower end.
START, END = 100000.125, 100000.25


def bound(target, records=FLOATS, bounds=(START, END)):
    return dpjax.prove_sensitivity(target, records, bounds=bounds, norm="linf").value


# Nothing of these is left in the compiled program.
BETWEEN = {
    "nothing": lambda y: y,
    "reshape": lambda y: y.reshape(N, 1),
    "broadcast": lambda y: jnp.broadcast_to(y[:, None], (N, 3)),
    "transpose": lambda y: y[:, None].T,
    "another constant": lambda y: y + 0.0,
    "slice": lambda y: y[0:N],
    "concatenate": lambda y: jnp.concatenate([y]),
    "two negations": lambda y: jnp.negative(-y),
    "factors": lambda y: (y * 2) * 0.5,
    "divisors": lambda y: (y / 4) * 4,
    "log and exp": lambda y: jnp.log(jnp.exp(y)),
    "log and logistic": lambda y: -jnp.log(1 / jax.nn.sigmoid(y) - 1),
    "two powers": lambda y: (y**-1) ** -1,
    "reciprocals": lambda y: 1 / (1 / y),
    "a sum of one": lambda y: y[:, None].sum(1),
    "a maximum of one": lambda y: y[:, None].max(1),
    "a sort of one": lambda y: jnp.sort(y[:, None], axis=1),
    "a product of one": lambda y: y[:, None] @ np.ones((1, 1), np.float32),
    "one case twice": lambda y: jnp.where(y > 0.2, y, y),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_compiler_adds_up_constants(between):
    move = BETWEEN[between]
    with pytest.raises(NoProofError, match="may be 0"):
        bound(lambda x: 1 / (move(x - 1e5) - 0.124))


def test_a_constant_alone_is_subtracted_as_it_is_written():
    assert bound(lambda x: 1 / (2 * (x - 1e5))) < 2.01


def moved(target, *records):
    first, second = np.asarray(jax.jit(target)(np.array(records, np.float32)), float)
    return abs(first - second)


def test_a_jump_where_constants_are_added_up():
    jump = lambda x: jnp.where((1e5 - x) + 0.124 < 0, 0.0, 1.0) + 1e-6 * x  # noqa: E731
    assert max(1, moved(jump, START, END)) <= bound(jump)


def test_constants_that_add_up_to_no_float_are_not_exact():
    """2^24 + 1 is no float32, so the sum of all three is off by 1."""
    jump = lambda x: x + 2.0**24 + 1.0 >= 2.0**24 - 1  # noqa: E731
    # The second array moves in any case, so that there is a bound if the first one does not.
    both = lambda x: (jump(x), x / 4)  # noqa: E731
    found = bound(both, bounds=dpjax.proving.Categories((-2.0, -1.0)))
    assert max(1, moved(jump, -2, -1)) <= found


@pytest.mark.parametrize("start", ["sum", "sum of rows"])
def test_a_compiler_starts_a_sum_at_what_is_added_to_it(start):
    """All of n - 1 additions round a number near 2^24: below it by less than above."""
    zeros = jnp.zeros((1, 1) if start == "sum of rows" else 1)

    def moved(n, width, released):
        """The distance of two databases, as computed and as proved."""
        places = jnp.zeros(n, jnp.int32)

        def target(x):
            return 2.0**24 - width + zeros.at[places].add(x.reshape(n, *zeros.shape[1:]))

        records = jax.ShapeDtypeStruct((n,), jnp.float32)
        proved = dpjax.prove_sensitivity(target, records, bounds=(0, width), norm="linf")
        program = jax.jit(proved.bounds.enforced_on(target) if released else target)
        first, second = (np.full(n, 1.4, np.float32) for _ in range(2))
        first[0], second[0] = 0, width
        return (program(second) - program(first)).item(), proved.value

    apart, found = moved(301, 330, released=False)
    assert max(630, apart) <= found
    # The sum of more records is exact where it is released, and only its total is rounded.
    apart, found = moved(1001, 1100, released=True)
    assert 1090 < apart <= found < 1110


def test_what_is_added_to_a_covariance_is_rounded_by_each_record():
    """Of more records, covariances are exact."""
    records = jax.ShapeDtypeStruct((200, 2), jnp.float32)
    alone, more = (
        bound(lambda x, by=by: jnp.cov(x, rowvar=False) + by, records, (0, 1)) for by in (0.0, 9.0)
    )
    assert more >= alone + 2 * 200 * 2.0**-24 * 9


def test_a_sum_of_counts_and_a_fraction_is_rounded_at_each_count():
    counts = lambda x: jnp.zeros(2).at[x.astype(int)].add(1.0)  # noqa: E731
    records, n = jax.ShapeDtypeStruct((1000,), jnp.float32), 1000
    assert bound(counts, records, (0, 1)) == pytest.approx(1, rel=1e-9)
    assert bound(lambda x: counts(x) + 5, records, (0, 1)) == pytest.approx(1, rel=1e-9)
    assert bound(lambda x: -counts(x) / 4 + 0.1, records, (0, 1)) >= 0.25 + n * n / 4 * 2.0**-24


SUMS = {
    "sums": lambda x: x.sum(1).sum(0),
    "transposed": lambda x: x.sum(0)[:, None].T.sum(),
    "negative": lambda x: (-x.sum(0)).sum(),
    "factors": lambda x: (x.sum(0) * 4 / 4).sum(),
    "side by side": lambda x: jnp.concatenate([x[:, :16].sum(1), x[:, 16:].sum(1)]).sum(),
    "times ones": lambda x: x.sum(1) @ np.ones(32, np.float32),
    "products with ones": lambda x: (x @ np.ones(32, np.float32)).sum(),
    "products of each record": lambda x: jnp.einsum("ni,ni->n", x, jnp.ones((32, 32))).sum(),
}


@pytest.mark.parametrize("sums", SUMS)
def test_a_compiler_takes_a_sum_of_sums_to_one_sum(sums):
    """32 times 32 numbers are added one by one; beyond 512, each addition rounds to 2^-14."""
    first = np.zeros((32, 32), np.float32)
    first[1:17], first[16, :4], first[17:] = 1, 0, 1.4 * 2.0**-15
    second = first.copy()
    second[0] = 1
    run = jax.jit(SUMS[sums])
    apart = abs(float(run(second)) - float(run(first)))
    records = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    # One sum of all terms, in the order of memory, moves by 32 + 480 * 2^-15.
    assert max(apart, 32 + 480 * 2.0**-15 - 2.0**-18) <= bound(SUMS[sums], records, (0, 1))


def test_a_product_with_ones_is_rounded_at_each_term_in_l2_too():
    records = jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)
    ones = np.ones((64, 1), np.float32)
    found, whole = (
        dpjax.prove_sensitivity(target, records, bounds=(1000, 1000.01), norm="l2").value
        for target in (lambda x: x.sum(2) @ ones, lambda x: x.sum((1, 2)))
    )
    assert found >= whole > 2 * 4096 * 1000 * 4096 * 2.0**-24


def test_a_mean_of_sums_is_rounded_at_each_term():
    """Records of 4,096 terms that cancel: the mean in a variance may add up all of them."""
    records = jax.ShapeDtypeStruct((100, 4096), jnp.float32)
    variance = lambda x: jnp.var(x.sum(1) / 1)  # noqa: E731
    found = dpjax.prove_sensitivity(variance, records, bounds=(-1e-3, 1e-3), norm="l1")
    off = 100 * 4096 * 2.0**-24 * 4.096
    assert found.value >= 8.192**2 * 99 / 100**2 + 2 * off**2


def test_a_mean_of_means_is_no_sum_of_sums():
    records = jax.ShapeDtypeStruct((100, 1000), jnp.float32)
    assert bound(lambda x: x.mean(1).mean(), records, (0, 1)) <= 0.01 + 3 * 1100 * 2.0**-24


PRODUCTS = {
    "a square": lambda x: jnp.square(x[0] * 2.0**70),
    "a power": lambda x: (x[0] * 2.0**65) ** 3,
    "a factor of a broadcast": lambda x: (x * 2.0**75) * jnp.broadcast_to(2.0**40 + x[0], (N,)),
    "a sum of copies": lambda x: jnp.broadcast_to(x[0] * 2.0**100, (2**10,)).sum() * 2.0**20,
    "a denominator": lambda x: 1 / (x[0] + 2.0**-42) / 2.0**40 / (x[1] + 2.0**-42),
}

# Records are at most 2^-60, or less where the numbers of the program would overflow by themselves.
LARGEST = {"a sum of copies": 2.0**-126}


@pytest.mark.parametrize("product", PRODUCTS)
def test_factors_that_overflow_together_are_refused(product):
    """XLA multiplies constants first: (x c) (y d) is (x y) (c d)."""
    with pytest.raises(NoProofError, match="may combine"):
        bound(PRODUCTS[product], bounds=(0, LARGEST.get(product, 2.0**-60)))


def test_a_sum_of_records_is_no_product():
    """A variance of 10^6 records, written out, has 60 bits: those of the mean count twice.

    With 20 more bits, more could be flushed to 0.
    """
    records = jax.ShapeDtypeStruct((10**6,), jnp.float32)
    try:
        found = bound(lambda x: ((x - x.mean()) ** 2).mean() * 2.0**-50, records, (0, 1))
    except NoProofError:
        found = np.inf
    assert 0 < found < 2e-6 * 2.0**-50


def test_factors_of_numbers_that_vanish_are_counted():
    product = lambda x: (x[0] * 2.0**50) * (x[1] * 2.0**50)  # noqa: E731
    assert bound(product, bounds=(2.0**-70, 1.01 * 2.0**-70)) >= 2.0**-26 * 2.0**-14


def test_factors_of_many_steps_are_no_product():
    """Each step stands in a sum, or inside of tanh."""

    def descent(x):
        step = lambda i, w: w - 0.01 * jnp.tanh(x.mean(0) * w)  # noqa: E731
        return lax.fori_loop(0, 50, step, jnp.ones(N))

    try:
        found = bound(descent, jax.ShapeDtypeStruct((9, N), jnp.float32), (0, 1))
    except NoProofError:
        found = np.inf
    assert found < 1


def test_a_product_of_booleans_is_refused():
    """It is 1, and a sum of three ones would be 3."""

    def target(x):
        ones = jnp.ones(3, bool)
        one = lax.dot_general(ones, ones, (((0,), (0,)), ((), ())))
        return jnp.where(one.astype(int) == 1, x, 0.1 * x)

    with pytest.raises(NoProofError, match="booleans"):
        bound(target, bounds=(0, 1))


def test_numbers_that_wrap_around_are_refused():
    """Places 3 and 259 of an iota of uint8 are both 3, so a record is at two places."""

    def one_hot(x, size):
        return (x[:, None] == lax.broadcasted_iota(jnp.uint8, (1, size), 1)).sum(0)

    records = jax.ShapeDtypeStruct((N,), jnp.uint8)
    assert bound(lambda x: one_hot(x, 256), records, (0, 7)) == pytest.approx(1)
    with pytest.raises(NoProofError, match="iota"):
        bound(lambda x: one_hot(x, 257), records, (0, 7))


def taken(array, places):
    """The places of an array of one axis, without the casts of `array[places]`."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(array, places, numbers, (1,), mode="clip")


def added(array, places):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(array, places[:, None], jnp.ones(len(places)), numbers, mode="clip")


def first_then_public(x):
    return jnp.concatenate([jnp.full(50, x.sum()), jnp.arange(300.0)])


AT_200 = {
    "dynamic_slice": lambda x: dynamic_slice_p.bind(
        first_then_public(x), jnp.uint8(200), slice_sizes=(2,)
    ),
    "take": lambda x: taken(first_then_public(x), jnp.array([200], jnp.uint8)),
    "look up": lambda x: taken(jnp.arange(300.0), (100 * x + 100).astype(jnp.uint8)[:, None]),
    "add": lambda x: added(jnp.zeros(300), (100 * x + 100).astype(jnp.uint8)),
    "uint32": lambda x: added(jnp.zeros(3), (x > 0.5).astype(jnp.uint32) + jnp.uint32(3 * 10**9)),
    "int8": lambda x: taken(jnp.arange(300.0), (100 * x).astype(jnp.int8)[:, None]),
}


@pytest.mark.parametrize("at", AT_200)
def test_places_are_signed_integers(at):
    """XLA takes 200 of uint8 for -56, which it clips to 0."""
    with pytest.raises(NoProofError, match="Use int32"):
        bound(AT_200[at], bounds=(0, 1))


@pytest.mark.parametrize("x64", [False, True])
def test_errors_of_elementary_functions_are_a_quarter_of_what_is_counted(x64):
    with jax.enable_x64(x64):
        shares = elementary_errors(8001, np.dtype(np.float64 if x64 else np.float32))
    assert {name: share for name, share in shares.items() if share > 1 / 4} == {}


class _Elsewhere:
    """An array on another kind of device."""

    def devices(self):
        return {type("Device", (), {"platform": "tpu"})()}


def test_a_release_on_another_platform_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="CPUs and GPUs"):
        _privatize._check_platform(_Elsewhere())
    _privatize._check_platform({"x": jnp.zeros(3)})
    jax.jit(lambda x: (_privatize._check_platform(x), x)[1])(jnp.zeros(3))
    proved = dpjax.prove_sensitivity(jnp.mean, FLOATS, bounds=(0, 1), norm="l1")
    private = dpjax.privatize(jnp.mean, dpjax.laplace(proved, 1.0))
    monkeypatch.setattr(_privatize, "_PROVED_ON", frozenset())
    with pytest.raises(ValueError, match="CPUs and GPUs"):
        private(dpjax.random.seeded_key(0), jnp.zeros(N))
