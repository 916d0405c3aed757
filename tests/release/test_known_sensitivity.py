"""Noise for less than a target is known to need is refused, whatever brings it in.

What else reaches `privatize` with a sensitivity: a bare number, `assume_sensitivity`, that of
another query or target, `dataclasses.replace`, a traced number, a mechanism of any kind, and a
target in other clothes (`jax.jit`, a bound method, by group, on a lattice, a lambda). `rehearse`
and `privacy_profile` draw without `privatize`. A sampled or a proved sensitivity belongs to its
traced program, which tests of their own compare.
"""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries, targets
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE
from dpjax.release._known_sensitivity import covering
from dpjax.targets._known_sensitivity import BoundedTarget

ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
KEY = dpjax.random.seeded_key(5)
N = 50
AGES = np.linspace(0, 99, N).astype("float32")
CODES = np.arange(N) % 10
TABLE = {"a": CODES % 2, "b": CODES % 3, "c": CODES % 2}
CUBE = AGES[:, None] / 100

COUNT = queries.counting_query(lambda age: age > 50)
TOTAL = queries.sum_query(lower=0, upper=100, capacity=N)
HISTOGRAM = queries.histogram_query(10)
MARGINALS = queries.marginal_workload({"a": 2, "b": 3, "c": 2}, [("a",), ("b",), ("a", "c")])
MATRIX = queries.linear_workload(np.eye(10, dtype=int) * 3)
SCORES = queries.quantile_scores([0.5, 0.9], grid=range(100))
BY_GROUP = queries.by(HISTOGRAM, column="group", keys=[0, 1], of="code")
SCORES_BY_GROUP = queries.by(SCORES, column="group", keys=[0, 1], of="age")
GROUPED = {"group": CODES % 2, "code": CODES, "age": AGES}
MEAN = targets.bounded_mean(lower=0, upper=100)
DENSITY = targets.kernel_density(bandwidth=0.1, dims=1)
LETTERS = targets.letter_counts(width=4)
TEXTS = np.asarray(targets.encode_text(["ada", "bob"] * (N // 2), width=4))

BY_L1 = {
    "a count": (COUNT, AGES),
    "a sum": (TOTAL, AGES),
    "a histogram": (HISTOGRAM, CODES),
    "marginals": (MARGINALS, TABLE),
    "a matrix": (MATRIX, CODES),
    "by group": (BY_GROUP, GROUPED),
    "a mean": (MEAN, AGES),
    "letters": (LETTERS, TEXTS),
    "a quantile": (targets.quantile(probability=0.5, lower=0, upper=100), AGES),
    "moments": (targets.moments(order=3, lower=0, upper=2), AGES / 50),
    "a classifier": (
        targets.linear_svm(regularization=1.0, dims=1),
        {"x": CUBE, "y": np.where(AGES > 50, 1.0, -1.0).astype("float32")},
    ),
    "compiled": (jax.jit(HISTOGRAM), CODES.astype("int32")),
    "a bound method": (HISTOGRAM.__call__, CODES),
}


def need(target, norm, **options):
    """How far a target says that it moves."""
    target = getattr(target, "__wrapped__", getattr(target, "__self__", target))
    return target.sensitivity(norm, n=N, **options)


def laplace(value):
    return dpjax.laplace(value, epsilon=1.0)


def refused(target, database, mechanism):
    with pytest.raises(ValueError, match="sensitivity is too small for this target") as refusal:
        dpjax.privatize(target, mechanism)(KEY, database)
    return str(refusal.value)


@pytest.mark.parametrize("name", BY_L1)
def test_noise_for_less_is_refused_with_both_numbers_and_enough_is_not(name):
    target, database = BY_L1[name]
    known = need(target, "l1")
    short = float(known.value) * (1 - 1e-6)
    told = refused(target, database, laplace(short))
    assert repr(short) in told
    assert repr(float(known.value)) in told
    refused(target, database, laplace(dataclasses.replace(known, value=short)))
    refused(target, database, laplace(dpjax.assume_sensitivity(short, norm="l1", n=N)))
    for enough in (known, float(known.value), 2 * float(known.value)):
        released = dpjax.privatize(target, laplace(enough))(KEY, database)
        assert released.guarantee.epsilon == 1.0


def test_noise_of_another_query_is_compared():
    refused(TOTAL, AGES, laplace(COUNT.sensitivity()))
    refused(MARGINALS, TABLE, laplace(COUNT.sensitivity()))
    unit = targets.bounded_mean(lower=0, upper=1)
    refused(MEAN, AGES, laplace(unit.sensitivity("l1", n=N)))
    assert dpjax.privatize(COUNT, laplace(HISTOGRAM.sensitivity()))(KEY, AGES).value.shape == ()


OTHER_MECHANISMS = {
    "Gaussian": (lambda s: dpjax.gaussian(s, 1.0, 1e-6), "l2", HISTOGRAM, CODES),
    "additive": (
        lambda s: additive(s, 1.0, norm="linf", noise=LAPLACE, multiplier=lambda e, d: 10 / e),
        "linf",
        HISTOGRAM,
        CODES,
    ),
    "exponential": (lambda s: dpjax.exponential(s, 1.0), "linf", HISTOGRAM, CODES),
    "permute and flip": (lambda s: dpjax.permute_and_flip(s, 1.0), "linf", LETTERS, TEXTS),
    "top k": (lambda s: queries.top_k(s, 1.0, k=3), "linf", HISTOGRAM, CODES),
    "select each": (lambda s: queries.select_each(s, 1.0, count=2), "linf", SCORES, AGES),
    "select each, by group": (
        lambda s: queries.select_each(s, 1.0, count=2),
        queries.sum_of_group_maxima,
        SCORES_BY_GROUP,
        GROUPED,
    ),
    "top k, by group": (
        lambda s: queries.top_k(s, 1.0, k=2),
        queries.sum_of_group_maxima,
        BY_GROUP,
        GROUPED,
    ),
    "above threshold": (
        lambda s: dpjax.above_threshold(s, 1.0, threshold=3.0, positives=1),
        "linf",
        HISTOGRAM,
        CODES,
    ),
    "posterior sampler": (
        lambda s: dpjax.posterior_sampler(s, 1.0, log_prior=np.zeros(10)),
        "range",
        HISTOGRAM,
        CODES,
    ),
    "Bernstein": (
        lambda s: dpjax.bernstein(s, 1.0, degree=4, dims=1),
        "linf",
        dpjax.evaluate_on_lattice(DENSITY, degree=4, dims=1),
        CUBE,
    ),
    "Bernstein, at once": (
        lambda s: dpjax.bernstein(s, 1.0, degree=4, dims=1),
        "linf",
        targets.kernel_density_on_lattice(bandwidth=0.1, degree=4, dims=1),
        CUBE,
    ),
}


@pytest.mark.parametrize("name", OTHER_MECHANISMS)
def test_every_kind_of_mechanism_is_compared(name):
    make, norm, target, database = OTHER_MECHANISMS[name]
    known = need(getattr(target, "target", target), norm)
    short = dpjax.assume_sensitivity(float(known.value) * 0.99, norm=norm)
    refused(target, database, make(short))
    dpjax.privatize(target, make(known))(KEY, database)


def test_a_table_of_another_workload_is_compared():
    larger = queries.linear_workload(np.eye(10, dtype=int) * 4)
    refused(larger, CODES, queries.mwem(MATRIX, 1.0, rounds=2, records=N))


def test_the_range_of_counts_is_known():
    assert HISTOGRAM.sensitivity("range").value == 2
    assert HISTOGRAM.sensitivity("range", relation=ADDED).value == 1
    # One answer may fall where another one rises.
    signed = queries.linear_workload([[1, 0], [0, -1]])
    assert signed.sensitivity("range", relation=ADDED).value == 2
    slots = queries.padded_records(CODES, capacity=64)
    half = dpjax.assume_sensitivity(0.5, norm="linf", relation=ADDED)
    refused(HISTOGRAM, slots, queries.top_k(half, 1.0, k=3))
    known = HISTOGRAM.sensitivity("range", relation=ADDED)
    by_range, by_half = queries.top_k(known, 1.0, k=3), queries.top_k(half, 1.0, k=3)
    released = dpjax.privatize(HISTOGRAM, by_range)(KEY, slots)
    np.testing.assert_array_equal(released.value, by_half(KEY, HISTOGRAM(slots)).value)
    with pytest.raises(ValueError, match="too small"):
        dpjax.privatize(
            HISTOGRAM, dpjax.exponential(dpjax.assume_sensitivity(1.0, norm="range"), 1.0)
        )(KEY, CODES)


def test_range_is_what_records_attain():
    """All pairs: the range of a difference is never above the one that is stated."""
    rows = np.arange(-1, 4)
    for query in (queries.histogram_query(3), queries.linear_workload([[1, 0, 2], [0, -1, 1]])):
        answers = np.asarray([query(np.array([row])) for row in rows])
        replaced = max(np.ptp(x - y) for x in answers for y in answers)
        added = max(np.ptp(x) for x in answers)
        assert replaced <= query.sensitivity("range").value
        assert added <= query.sensitivity("range", relation=ADDED).value


@pytest.mark.parametrize(
    "made",
    [
        dpjax.randomized_response(1.0, categories=10),
        queries.select_each(
            dpjax.assume_sensitivity(1.0, norm=queries.sum_of_group_maxima), 1.0, count=2
        ),
    ],
    ids=["hamming", "by group"],
)
def test_a_norm_in_which_nothing_is_known_is_refused(made):
    """Mechanisms of records take the norm hamming: a replaced record moves two counts."""
    with pytest.raises(ValueError, match="knows its sensitivity only in l1, l2, linf, range under"):
        dpjax.privatize(HISTOGRAM, made)(KEY, CODES)


def test_a_relation_in_which_nothing_is_known_is_refused():
    bound = dpjax.assume_sensitivity(100.0, norm="l1", relation=ADDED, n=N)
    known = "but a BoundedSum knows its sensitivity only in l1, l2, linf under replace-one"
    with pytest.raises(ValueError, match=f"in l1 under add-or-remove-one, {known}"):
        dpjax.privatize(MEAN, laplace(bound))(KEY, AGES)


@pytest.mark.parametrize(
    "around",
    [jax.vmap, lambda query: functools.wraps(query)(lambda ages: 100 * query(ages))],
    ids=["vmap", "a decorator"],
)
def test_a_compiled_function_around_a_query_is_another_target(around):
    """It names the query as what it wraps, but a record may move it further."""
    mechanism = laplace(COUNT.sensitivity())
    with pytest.raises(ValueError, match="the target is another function"):
        dpjax.privatize(jax.jit(around(COUNT)), mechanism)
    dpjax.privatize(jax.jit(jax.jit(COUNT)), mechanism)(KEY, AGES)


def test_what_a_query_says_of_itself_is_for_nothing_else():
    """A function around it may move further: of that, nothing is known."""
    for function in (
        jnp.sum,
        lambda ages: 2 * TOTAL(ages),
        lambda ages: (COUNT(ages), TOTAL(ages)),
    ):
        with pytest.raises(ValueError, match="sensitivity was made by a Query"):
            dpjax.privatize(function, laplace(COUNT.sensitivity()))
    with pytest.raises(ValueError, match="made by a BoundedSum"):
        dpjax.privatize(lambda ages: 100 * MEAN(ages), laplace(need(MEAN, "l1")))
    with pytest.raises(ValueError, match="made by a Query"):
        jax.vmap(lambda s: dpjax.privatize(jnp.sum, laplace(s))(KEY, AGES).value)(
            jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], COUNT.sensitivity())
        )
    stated = dpjax.assume_sensitivity(1.0, norm="l1")  # One's own promise.
    dpjax.privatize(lambda ages: COUNT(ages), laplace(stated))(KEY, AGES)


TRACED = {
    "Laplace": (laplace, lambda value: np.isnan(value) | (value == np.iinfo("int32").min)),
    "Gaussian": (
        lambda s: dpjax.gaussian(s, 1.0, 1e-6),
        lambda value: value == np.iinfo("int32").min,
    ),
    "exponential": (lambda s: dpjax.exponential(s, 1.0), lambda value: value == -1),
    "top k": (lambda s: queries.top_k(s, 1.0, k=3), lambda value: value == -1),
    "above threshold": (
        lambda s: dpjax.above_threshold(s, 1.0, threshold=3.0, positives=1),
        lambda value: value == -1,
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_sensitivity_that_is_too_small_gives_nothing(name):
    make, failed = TRACED[name]
    norm = make(1.0).norm
    known = float(HISTOGRAM.sensitivity(norm).value)

    def private(value):
        return dpjax.privatize(HISTOGRAM, make(value))(KEY, CODES)

    values = jnp.asarray([known * 0.99, known, known * 1.01], jnp.float32)
    released = jax.vmap(private)(values)
    shown = np.asarray(released.value).reshape(3, -1)
    assert np.all(failed(shown[0]))
    assert not np.any(failed(shown[1:]))
    assert np.isnan(released.guarantee.epsilon[0])
    assert not np.any(np.isnan(released.guarantee.epsilon[1:]))


def test_a_known_sensitivity_passes_through_jit():
    """As float32 it may be rounded down: the noise has more to spare."""
    for query in (MARGINALS, queries.linear_workload([[7], [3]])):
        for norm, make in (("l1", laplace), ("l2", lambda s: dpjax.gaussian(s, 1.0, 1e-6))):
            mechanism = make(query.sensitivity(norm))
            database = TABLE if query is MARGINALS else CODES
            released = jax.jit(lambda m, q=query, d=database: dpjax.privatize(q, m)(KEY, d).value)
            assert np.all(np.asarray(released(mechanism)) > np.iinfo("int32").min)


@pytest.mark.parametrize("k", range(1, 30))
def test_a_square_root_that_is_rounded_to_nearest_is_enough(k):
    """A bound is rounded up, and math.sqrt to nearest."""
    names = [f"x{i}" for i in range(k)]
    query = queries.marginal_workload(dict.fromkeys(names, 2), [(name,) for name in names])
    noise = dpjax.gaussian(math.sqrt(2 * k), 1.0, 1e-6)
    assert covering(noise, float(query.sensitivity("l2").value)) is noise
    with pytest.raises(ValueError, match="too small"):
        covering(dpjax.gaussian(math.sqrt(2 * k) * (1 - 1e-12), 1.0, 1e-6), math.sqrt(2 * k))


def uniform(key, n):
    return jax.random.randint(key, (n,), 0, 10)


def test_what_draws_without_a_release_refuses_it_too():
    pytest.importorskip("xarray")
    for noise in (laplace(1.0), laplace(COUNT.sensitivity())):
        with pytest.raises(ValueError, match="too small"):
            dpjax.rehearse(KEY, HISTOGRAM, uniform, n=N, mechanisms=noise)
        with pytest.raises(ValueError, match="too small"):
            dpjax.privacy_profile(KEY, [(HISTOGRAM, noise)], uniform, n=N, m=100)


def test_a_sampled_sensitivity_may_be_smaller():
    """That is what its gamma is for; it belongs to the traced program."""
    sampled = dpjax.sample_sensitivity(
        jax.random.key(0), MEAN, lambda key, n: jax.random.uniform(key, (n,)), n=N, norm="l1", m=20
    )
    assert sampled.value < need(MEAN, "l1").value
    assert dpjax.privatize(MEAN, laplace(sampled))(KEY, AGES).guarantee.gamma > 0


def test_a_proved_sensitivity_may_be_smaller():
    """Its records are clamped first."""
    mean = BoundedTarget(jnp.mean, bound=lambda n, dtype: [Fraction(5)])
    proved = dpjax.prove_sensitivity(mean, AGES, bounds=(0, 1), norm="l1")
    assert proved.value < 0.1
    assert dpjax.privatize(mean, laplace(proved))(KEY, AGES).guarantee.gamma == 0
    refused(mean, AGES, laplace(float(proved.value)))
