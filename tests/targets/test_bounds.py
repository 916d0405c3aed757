"""Known sensitivities: norms of rationals, rounded up, and what no bound is known for."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import targets
from dpjax.targets._known_sensitivity import norm_up, sqrt_up

EXACT = [
    Fraction(2),
    Fraction(1, 3),
    Fraction(10**40 + 1),
    Fraction(1, 7**90),
    Fraction(math.pi) ** 5,
    Fraction(5e-324),
    9 + Fraction(1, 2**400),  # Its root begins with the digits of a float.
]


@pytest.mark.parametrize("exact", EXACT, ids=lambda exact: f"{float(exact):.3g}")
def test_square_roots_are_the_least_float_above(exact):
    root = sqrt_up(exact)
    assert Fraction(root) ** 2 >= exact
    assert Fraction(math.nextafter(root, 0)) ** 2 < exact


@pytest.mark.parametrize("root", [0.0, 3.0, 0.1, 1e-150, 123456789.125])
def test_square_roots_that_are_floats_are_exact(root):
    assert sqrt_up(Fraction(root) ** 2) == root


def test_norms():
    third = Fraction(1, 3)
    assert norm_up([Fraction(3), Fraction(4)], "l2") == 5
    assert norm_up([Fraction(3), Fraction(4)], "l1") == 7
    assert norm_up([Fraction(3), Fraction(4)], "linf") == 4
    assert 2 * third <= Fraction(norm_up([third] * 2, "l1"))
    assert third <= Fraction(norm_up([third] * 2, "linf"))
    with pytest.raises(ValueError, match="hamming"):
        norm_up([third], "hamming")


def test_float64_records_run_in_float32_where_jax_has_no_float64():
    mean = targets.bounded_mean(lower=0, upper=1)
    narrow = mean.sensitivity("l1", n=10**6).value
    assert mean.sensitivity("l1", n=10**6, dtype="float64").value == narrow
    with jax.enable_x64(True):
        assert mean.sensitivity("l1", n=10**6, dtype="float64").value < narrow


def test_what_no_bound_is_known_for_is_refused_by_name():
    """Else a mechanism would be calibrated to a bound of something else."""
    mean = targets.bounded_mean(lower=0, upper=1)
    svm = targets.linear_svm(regularization=1.0, dims=2)
    with pytest.raises(ValueError, match=r"norm must be one of .*'l1'.*, got 'l2'"):
        svm.sensitivity("l2")
    with pytest.raises(ValueError, match=r"norm must be one of .*, got 'hamming'"):
        mean.sensitivity("hamming", n=10)
    with pytest.raises(ValueError, match="relation must be replace-one"):
        mean.sensitivity(n=10, relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with pytest.raises(TypeError, match="n must be an integer"):
        mean.sensitivity()
    with pytest.raises(ValueError, match="dims must be given"):
        targets.linear_svm(regularization=1.0).sensitivity()
    with pytest.raises(ValueError, match="clip must be True"):
        targets.linear_svm(regularization=1.0, dims=2, clip=False).sensitivity()
    with pytest.raises(TypeError, match="dtype must be a dtype of floats"):
        mean.sensitivity(n=10, dtype="int32")
    with pytest.raises(TypeError, match="got a BoundedSum: call its method `sensitivity`"):
        dpjax.laplace(mean, 1.0)


def test_a_known_sensitivity_says_what_it_holds_for():
    found = targets.bounded_mean(lower=0, upper=1).sensitivity("l2", n=10)
    assert (found.norm, found.n, found.gamma, found.confidence) == ("l2", 10, 0, 1)
    assert targets.linear_svm(regularization=1.0, dims=2).sensitivity().norm == "l1"
    scores = dpjax.queries.quantile_scores(0.5, grid=[0, 1])
    assert scores.sensitivity().norm == "linf"
    removed = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert scores.sensitivity(n=10, relation=removed).relation is removed


@pytest.mark.parametrize(
    ("target", "records"),
    [
        (targets.bounded_mean(lower=0, upper=1), jnp.ones((3, 2))),
        (targets.bounded_mean(lower=0, upper=1, dims=3), {"a": jnp.ones(3), "b": jnp.ones(3)}),
        (targets.kernel_density(bandwidth=1.0, dims=1), jnp.ones((3, 2))),
        *(
            (target, {"x": jnp.ones((3, 2)), "y": jnp.ones(3)})
            for target in (
                targets.linear_svm(regularization=1.0, dims=3),
                targets.ridge_regression(regularization=1.0, dims=3),
                targets.logistic_regression(regularization=1.0, dims=1),
            )
        ),
    ],
)
def test_records_that_a_bound_does_not_hold_for_are_refused(target, records):
    """A mean of two numbers that is released under the bound for one has half of the noise."""
    with pytest.raises(ValueError, match="records must have dims"):
        target(records)
