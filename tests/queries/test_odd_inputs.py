"""Queries and private statistics under the inputs of tests/odd_inputs.py.

What else brings records in: `privatize`, the `private_` functions, `padded_records`, and reports of
local mechanisms. Each reads arrays of any dtype, in any memory order, with any numbers in them.
"""

import jax
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax import queries
from dpjax.random import seeded_key
from query_table import CASES

KEY = seeded_key(11)
# Noise is below 10^-3 but for once in e^100 keys.
SHARP = 1e5
WHOLE = np.asarray([1.0, 0.0, 3.0, 1.0, 7.0, 2.0, 1.0, 1.0])
PLANE = np.stack([WHOLE, WHOLE[::-1]], axis=1)


def released(query, norm="l1"):
    """`entry(records)`: what is released, with next to no noise."""

    def entry(records):
        mechanism = dpjax.laplace(query.sensitivity(norm), SHARP)
        return dpjax.privatize(query, mechanism)(KEY, records).value

    return entry


def scores(records):
    """Of the quantiles, as they are: every score is an integer of ranks."""
    query = queries.quantile_scores(0.5, grid=(0.0, 1.0, 2.0, 3.0))
    mechanism = queries.select_each(query.sensitivity(), SHARP, count=1)
    return dpjax.privatize(query, mechanism)(KEY, records).value


def statistic(function, **arguments):
    return lambda records: function(KEY, records, **arguments).value


def clipped(low, high):
    """Numbers as queries say they count: NaN as the lower end."""
    return lambda x: np.clip(np.where(np.isnan(x), low, x), low, high)


BOUNDS = {"lower": 0.0, "upper": 8.0, "epsilon": SHARP}
RADIUS = {"radius": 16.0, "epsilon": 40.0, "delta": 1e-6}
TABLE = {
    "counting_query": (
        released(queries.counting_query(lambda record: record > 1)),
        WHOLE,
        lambda x: np.sum(x > 1),
    ),
    "sum_query": (
        released(queries.sum_query(lower=0.0, upper=8.0, capacity=100)),
        WHOLE,
        lambda x: np.sum(clipped(0, 8)(x)),
    ),
    "histogram_query": (
        released(queries.histogram_query((0.0, 1.0, 2.0, 4.0))),
        WHOLE,
        lambda x: np.histogram(x[(x >= 0) & (x <= 4)], [0, 1, 2, 4])[0],
    ),
    "private_mean": (
        statistic(queries.private_mean, **BOUNDS),
        WHOLE,
        lambda x: np.mean(clipped(0, 8)(x)),
    ),
    "private_variance": (
        statistic(queries.private_variance, **BOUNDS),
        WHOLE,
        lambda x: {"mean": np.mean(clipped(0, 8)(x)), "variance": np.var(clipped(0, 8)(x))},
    ),
    "quantile_scores": (
        scores,
        WHOLE,
        None,
    ),
    "padded_records": (
        lambda x: queries.padded_records(x, capacity=16).records,
        WHOLE,
        None,
    ),
    "private_covariance": (
        lambda x: queries.private_covariance(KEY, x, **RADIUS).value,
        PLANE,
        None,
    ),
}


def by_itself(query):
    """The answer to the same numbers in float32, without noise."""
    return lambda x: query(x.astype("float32"))


TABLE |= {
    name: (released(query), WHOLE, by_itself(query))
    for name, (query, records, *_) in CASES.items()
    if isinstance(records, np.ndarray)
}
TOLERANCE = {"tolerance": 1e-2}
every = pytest.mark.parametrize("name", TABLE)
NAMES = "database|records|PRNGKey"


@every
def test_what_hides_something_is_refused(name):
    entry, plain, _ = TABLE[name]
    odds = [odd for odd in odd_inputs.hiding_in_columns(plain) if odd.name != "empty"]
    odd_inputs.assert_refused(entry, odds, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@every
def test_the_same_numbers_give_the_same_answer(name, x64):
    entry, plain, reference = TABLE[name]
    with jax.enable_x64(x64):
        odds = odd_inputs.written_otherwise(plain)
        odd_inputs.assert_right(entry, odds, NAMES, reference, **TOLERANCE)


@pytest.mark.slow
@every
def test_no_number_of_a_private_record_is_refused(name):
    entry, plain, reference = TABLE[name]
    odds = [odd for odd in odd_inputs.strange_numbers(plain)]
    if name == "padded_records":  # Keeps them for what comes after it.
        odds = [odd for odd in odds if np.isfinite(odd.means).all()]
    odd_inputs.assert_released(entry, odds, reference, **TOLERANCE)


@pytest.mark.slow
@every
def test_wide_integers_never_wrap(name):
    entry, plain, reference = TABLE[name]
    if name in CASES:  # Float32 does not hold these numbers.
        reference = None
    odd_inputs.assert_released(entry, odd_inputs.wide_numbers(plain), reference, **TOLERANCE)


REPORTS = np.asarray([2, 0, 1, 1, 0, 2, 2, 2])


def test_reports_are_whole_numbers_of_known_categories():
    mechanism = dpjax.randomized_response(20.0, categories=3)

    def entry(reports):
        return queries.frequencies(reports, mechanism).estimates

    odd_inputs.assert_refused(entry, odd_inputs.hiding(REPORTS), "reports")
    odd_inputs.assert_right(
        entry,
        odd_inputs.written_otherwise(REPORTS),
        "reports",
        lambda x: np.bincount(x.astype(int), minlength=3) / len(x),
        tolerance=1e-4,
    )
