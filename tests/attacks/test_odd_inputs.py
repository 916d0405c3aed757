"""Attacks take public numbers: what hides something is refused, other dtypes give the same."""

import jax
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax import attacks

BITS = np.asarray([1.0, 0.0, 1.0, 1.0])
ROWS = np.asarray([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
INSIDE = ROWS == 1
GUARANTEE = dpjax.Guarantee(1.0, 0.0)
COUNTS = np.asarray([0.0, 1.0, 1.0, 2.0])
TABLE = {
    "subset_counts, database": (attacks.subset_counts, BITS),
    "subset_distortions, answers": (attacks.subset_distortions, COUNTS),
    "reconstruct_from_all_subsets, answers": (attacks.reconstruct_from_all_subsets, COUNTS),
    "reconstruct_from_noisy_table, table": (attacks.reconstruct_from_noisy_table, BITS),
    "reconstruct_from_walsh_hadamard, answers": (attacks.reconstruct_from_walsh_hadamard, BITS),
    "walsh_hadamard, database": (attacks.walsh_hadamard, BITS),
    "differencing, queries": (
        lambda x: attacks.differencing(x, np.asarray([1.0, 2.0, 1.0])).values,
        ROWS,
    ),
    "differencing, answers": (
        lambda x: attacks.differencing(np.eye(4), x).values,
        BITS,
    ),
    "tracing_scores, records": (
        lambda x: attacks.tracing_scores(x, BITS / 2, np.full(4, 0.25)),
        ROWS,
    ),
    "tracing_scores, means": (
        lambda x: attacks.tracing_scores(ROWS, x, np.full(4, 0.5)),
        BITS,
    ),
    "roc_curve, scores": (lambda x: attacks.roc_curve(x, BITS == 1).area, BITS),
    "roc_curve, members": (lambda x: attacks.roc_curve(BITS, x).area, BITS),
    "lira, scores": (lambda x: attacks.lira(x, INSIDE), ROWS),
    "lira, members": (lambda x: attacks.lira(ROWS, x), ROWS),
    "rmia, likelihoods": (lambda x: attacks.rmia(x, INSIDE, ROWS + 1), ROWS),
    "rmia, population": (lambda x: attacks.rmia(ROWS + 1, INSIDE, x), ROWS),
    "highest_true_positive_rate, false_positive_rates": (
        lambda x: attacks.highest_true_positive_rate(GUARANTEE, x),
        BITS,
    ),
    "expected_recovered_fraction, c": (attacks.expected_recovered_fraction, BITS),
    "logit_confidence, logits": (
        lambda x: attacks.logit_confidence(x, np.asarray([0, 1, 0])),
        ROWS,
    ),
}
every = pytest.mark.parametrize("name", TABLE)


@every
def test_what_hides_something_is_refused(name):
    entry, plain = TABLE[name]
    odds = [odd for odd in odd_inputs.hiding(plain) if odd.name != "empty"]
    odd_inputs.assert_refused(entry, odds, name.split(", ")[1])


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@every
def test_the_same_numbers_give_the_same_answer(name, x64):
    entry, plain = TABLE[name]
    with jax.enable_x64(x64):
        right = entry(plain.astype("float32"))
        odds = odd_inputs.written_otherwise(plain)
        odd_inputs.assert_right(entry, odds, name.split(", ")[1], lambda _: right)


@pytest.mark.parametrize("members", [BITS / 2, -BITS, np.asarray([np.nan, 0, 1, 1])])
def test_members_are_true_or_false(members):
    """A probability is not rounded to membership, nor is NaN."""
    with pytest.raises(ValueError, match="members must be True or False"):
        attacks.roc_curve(BITS, members)
    with pytest.raises(ValueError, match="members must be True or False"):
        attacks.lira(np.stack([BITS] * 4), np.stack([members] * 4))


def test_columns_with_a_mask_are_not_linked():
    table = {"zip": np.ma.array([1, 2, 3], mask=[0, 0, 1])}
    with pytest.raises(TypeError, match=r"table\['zip'\] must be arrays without a mask"):
        attacks.anonymity(table, on=["zip"])
