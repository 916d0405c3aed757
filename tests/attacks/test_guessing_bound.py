"""What a guarantee leaves to guess: attained by the worst mechanisms, exceeded by none."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import guessing_bound

EPSILONS = (0.01, 1.0, 3.0)


def best_guess(masses):
    """How often the likelier of K equally likely values is right; a row for each value."""
    return np.sum(np.max(masses, axis=0)) / len(masses)


@pytest.mark.parametrize("categories", [2, 5])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_randomized_response_attains_the_bound(epsilon, categories):
    mechanism = dpjax.randomized_response(epsilon, categories=categories)
    values = jnp.arange(categories)
    masses = [[mechanism.log_prob(y, x) for y in values] for x in values]
    bound = guessing_bound(mechanism.guarantee, categories=categories)
    assert best_guess(np.exp(masses)) == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_worst_pair_there_is_attains_the_bound(epsilon, delta):
    """Kairouz, Oh and Viswanath: with probability delta the value itself is told."""
    truth, lie = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    exact = best_guess([[delta, truth, lie, 0], [0, lie, truth, delta]])
    bound = guessing_bound(dpjax.Guarantee(epsilon, delta))
    assert exact <= bound <= exact * (1 + 1e-13)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_mechanism_leaves_more_than_the_bound(epsilon):
    """In the worst case of two values at the sensitivity: half of 1 + total variation."""
    laplace = dpjax.laplace(1.0, epsilon)
    gaussian = dpjax.gaussian(1.0, epsilon, 1e-5)
    assert 1 - math.exp(-0.5 / laplace.scale) / 2 < guessing_bound(laplace.guarantee)
    assert scipy.special.ndtr(0.5 / gaussian.scale) < guessing_bound(gaussian.guarantee)


def test_the_ends():
    assert guessing_bound(dpjax.Guarantee(math.inf)) == 1
    assert guessing_bound(dpjax.Guarantee(1.0, 1.0)) == 1
    assert guessing_bound(dpjax.Guarantee(0.0)) == pytest.approx(1 / 2, rel=1e-13)
    assert guessing_bound(dpjax.Guarantee(0.0), categories=10) == pytest.approx(1 / 10, rel=1e-13)


def test_what_is_no_guess_of_a_record_is_refused():
    removed = dpjax.Guarantee(1.0, relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert guessing_bound(removed) == guessing_bound(dpjax.Guarantee(1.0))
    with pytest.raises(ValueError, match="categories"):
        guessing_bound(removed, categories=3)
    with pytest.raises(ValueError, match="categories"):
        guessing_bound(removed, categories=1)
    with pytest.raises(TypeError, match="Guarantee"):
        guessing_bound(1.0)  # type: ignore[arg-type]
