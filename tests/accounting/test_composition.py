"""What several releases promise together: every sentence of the design on it."""

import dataclasses
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import Guarantee, NeighboringRelation, Release, SampledEvent
from dpjax.accounting import compose, group, post_process, under_distribution_shift
from tables import for_each


def sampled(epsilon, gamma, confidence, identity, delta=0.0):
    """The guarantee of a release under one sampled sensitivity."""
    event = SampledEvent(gamma, confidence, identity)
    return Guarantee(epsilon, delta, gamma, confidence, (event,))


MARGINALLY = -1.0  # Stands for a confidence of None, so that tuples can be compared.


def statement(guarantee):
    confidence = MARGINALLY if guarantee.confidence is None else guarantee.confidence
    return (guarantee.epsilon, guarantee.delta, guarantee.gamma, confidence)


A = sampled(0.5, 0.05, 0.99, "a", delta=1e-6)
B = sampled(0.25, 0.02, 0.95, "b")
M = sampled(1.0, 0.1, None, "m")
PURE = Guarantee(2.0, 1e-7)


# Composition.


def test_epsilon_and_delta_add():
    assert statement(compose(PURE, Guarantee(0.5, 1e-8))) == (2.5, pytest.approx(1.1e-7), 0.0, 1.0)
    assert repr(compose(PURE)) == repr(PURE)


def test_gamma_and_doubt_add_over_samplings():
    together = compose(A, B, PURE)
    assert statement(together) == pytest.approx((2.75, 1.1e-6, 0.07, 0.94), rel=1e-12)
    assert [event.identity for event in together.events] == ["a", "b"]


def test_the_restriction_comes_first_in_the_docstring():
    restriction = compose.__doc__.split("\n\n")[1]
    restriction = " ".join(restriction.split())
    assert restriction.startswith(
        "You must have chosen targets, sizes, norms and oracles without the private data"
    )


def test_marginal_and_confidence_are_never_confused():
    mixed = compose(A, M)
    assert mixed.confidence is None
    assert mixed.gamma == pytest.approx(0.05 + 0.01 + 0.1, rel=1e-12)
    assert repr(mixed).endswith("marginal, under replace-one")
    both = compose(M, sampled(1.0, 0.2, None, "m2"))
    assert (both.gamma, both.confidence) == (pytest.approx(0.3, rel=1e-12), None)


def test_a_marginal_result_stays_marginal_and_keeps_what_it_counted():
    once, stepwise = compose(A, B, M), compose(compose(A, M), B)
    assert statement(stepwise) == pytest.approx(statement(once), rel=1e-12)
    assert stepwise.confidence is None


def test_everything_is_capped():
    certain = [sampled(1.0, 0.6, 0.4, name, delta=0.7) for name in "abc"]
    assert statement(compose(*certain)) == (3.0, 1.0, 1.0, 0.0)
    assert compose(*certain, M).gamma == 1.0


numbers = st.floats(1e-12, 0.01)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_sum_is_the_least_float_that_is_not_below(rows):
    releases = [
        sampled(e, g, 1 - doubt, str(i), delta=d) for i, (e, d, g, doubt) in enumerate(rows)
    ]
    together = compose(*releases)
    for field in ("epsilon", "delta", "gamma"):
        exact = sum(Fraction(getattr(release, field)) for release in releases)
        claimed = getattr(together, field)
        assert Fraction(claimed) >= exact > Fraction(math.nextafter(claimed, 0)), field
    doubt = sum(1 - Fraction(release.confidence) for release in releases)
    claimed = together.confidence
    assert Fraction(claimed) <= 1 - doubt < Fraction(math.nextafter(claimed, 2))


def test_relations_mix_under_replace_one():
    other = Guarantee(1.0, 1e-6, relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert compose(other, other).relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    mixed = compose(PURE, other)
    assert mixed.relation is NeighboringRelation.REPLACE_ONE
    assert mixed.epsilon == PURE.epsilon + 2.0
    assert mixed.delta == pytest.approx(PURE.delta + (1 + math.e) * 1e-6)


def test_notes_are_kept_once():
    noted = [Guarantee(1.0, notes=notes) for notes in (("no noise",), (), ("no noise", "other"))]
    assert compose(*noted).notes == ("no noise", "other")
    assert (
        group(noted[0], 2).notes
        == under_distribution_shift(noted[0], kl=0.1, n=5).notes
        == ("no noise",)
    )


# One event.


def test_releases_under_one_sampling_share_its_gamma():
    again = sampled(2.0, 0.05, 0.99, "a")
    assert statement(compose(A, again, A))[2:] == (0.05, 0.99)
    assert statement(compose(compose(A, B), compose(again, B))) == pytest.approx(
        (3.0, 1e-6, 0.07, 0.94), rel=1e-12
    )


def test_guarantees_of_mechanisms_share_events(key):
    def oracle(key, n):
        return jax.random.uniform(key, (n,))

    def sample(key):
        return dpjax.sample_sensitivity(key, jnp.max, oracle, n=3, norm="l1", m=100, gamma=0.1)

    one, other = (sample(jax.random.fold_in(key, i)) for i in range(2))
    releases = [dpjax.laplace(one, 0.5)(key, 0.1), dpjax.laplace(one, 0.25)(key, 0.2)]
    guarantees = [release.guarantee for release in releases]
    assert statement(compose(*guarantees)) == (0.75, 0.0, 0.1, 0.99)
    separate = compose(*guarantees, dpjax.laplace(other, 0.25).guarantee)
    assert statement(separate) == pytest.approx((1.0, 0.0, 0.2, 0.98), rel=1e-12)


def test_guarantees_written_by_hand_are_events_of_their_own():
    ones = [Guarantee(1.0, gamma=gamma, confidence=0.99) for gamma in (0.01, 0.02, 0.03, 0.04)]
    assert statement(compose(*ones)) == pytest.approx((4.0, 0.0, 0.1, 0.96), rel=1e-12)


def test_guarantees_written_by_hand_stay_apart_in_steps():
    ones = [Guarantee(1.0, gamma=gamma, confidence=0.99) for gamma in (0.01, 0.02, 0.03, 0.04)]
    expected = pytest.approx((4.0, 0.0, 0.1, 0.96), rel=1e-12)
    assert statement(compose(compose(*ones[:2]), compose(*ones[2:]))) == expected
    assert statement(compose(compose(compose(*ones[:2]), ones[2]), ones[3])) == expected
    for step in (lambda one: group(one, 1), lambda one: under_distribution_shift(one, kl=0, n=5)):
        assert statement(compose(*map(step, ones))) == expected


def test_the_order_of_releases_does_not_matter():
    # Two statements about one sampling: the weaker counts.
    one, other = sampled(1.0, 0.02, 0.9, "a"), sampled(1.0, 0.04, 0.95, "a")
    assert statement(compose(one, other)) == statement(compose(other, one)) == (2.0, 0, 0.04, 0.9)
    marginal = sampled(1.0, 0.01, None, "a")
    for together in (compose(one, marginal), compose(marginal, one)):
        assert together.confidence is None
        assert together.gamma >= 0.02


def test_a_guarantee_whose_gamma_was_changed_by_hand_counts_at_its_worst():
    changed = dataclasses.replace(A, gamma=0.2)
    for made in (changed, group(changed, 1), under_distribution_shift(changed, kl=0, n=5)):
        assert statement(compose(made)) == pytest.approx((0.5, 1e-6, 0.2, 0.99), rel=1e-12)
    assert compose(changed, A, B).gamma == pytest.approx(0.22, rel=1e-12)
    assert group(changed, 2).gamma == pytest.approx(0.4, rel=1e-12)
    assert compose(dataclasses.replace(A, gamma=0.01)).gamma == 0.05
    assert compose(dataclasses.replace(A, gamma=1.0), B).gamma == 1.0
    # A marginal .05 is no weaker than .05 with confidence .99, which is a marginal .06.
    assert compose(dataclasses.replace(A, confidence=None)).gamma == pytest.approx(0.06, rel=1e-12)
    assert compose(A, dataclasses.replace(A, confidence=None)).gamma >= 0.06


@pytest.mark.parametrize("events", [(A,), (A, B), (A, M), (M,)])
@for_each("gamma, confidence", itertools.product([0.01, 0.07, 0.3], [None, 0.5, 0.94, 0.9999]))
def test_no_statement_changed_by_hand_is_forgotten(gamma, confidence, events):
    """Neither that of the guarantee nor that of its samplings: all in exact rationals."""
    honest = compose(*events)
    made = compose(dataclasses.replace(honest, gamma=gamma, confidence=confidence))
    for claim_gamma, claim_confidence in ((gamma, confidence), (honest.gamma, honest.confidence)):
        if made.confidence is None:
            doubt = 0 if claim_confidence is None else 1 - Fraction(claim_confidence)
            implied = Fraction(claim_gamma) + doubt
            assert Fraction(made.gamma) >= implied
        else:
            assert made.gamma >= claim_gamma
            assert claim_confidence is not None
            assert made.confidence <= claim_confidence
    assert statement(compose(made)) == pytest.approx(statement(made), rel=1e-12)
    assert statement(compose(made, made))[2:] == pytest.approx(statement(made)[2:], rel=1e-12)


# Groups.


@pytest.mark.parametrize("size", [1, 2, 3, 10])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 3.0])
def test_groups(size, epsilon):
    one = sampled(epsilon, 0.01, 0.99, "a", delta=1e-15)
    many = group(one, size)
    assert (many.epsilon, many.gamma, many.confidence) == pytest.approx(
        (size * epsilon, size * 0.01, 0.99), rel=1e-15
    )
    assert Fraction(many.epsilon) >= size * Fraction(epsilon)
    assert Fraction(many.gamma) >= size * Fraction(0.01)
    with mpmath.workdps(50):
        e = mpmath.mpf(epsilon)
        exact = mpmath.mpf(1e-15) * mpmath.expm1(size * e) / mpmath.expm1(e)
        assert exact <= many.delta <= exact * (1 + 1e-10)


def test_groups_of_groups():
    twice, once = group(group(A, 2), 3), group(A, 6)
    assert statement(twice) == pytest.approx(statement(once), rel=1e-10)
    assert twice.group_size == once.group_size == 6
    assert repr(once).endswith(", for groups of 6")
    assert "groups" not in repr(group(A, 1))


def test_groups_of_different_sizes_do_not_compose():
    assert compose(group(A, 2), group(B, 2)).group_size == 2
    with pytest.raises(ValueError, match=r"the same group size, got \[1, 2\]"):
        compose(A, group(B, 2))


def test_groups_without_epsilon_and_with_too_much():
    assert group(Guarantee(0.0, 1e-6), 3).delta == pytest.approx(3e-6)
    assert group(Guarantee(10.0, 1e-6), 1000).delta == 1.0
    assert group(sampled(1.0, 0.4, 0.9, "a"), 3).gamma == 1.0
    assert group(Guarantee(1.0), 5).delta == 0.0


def test_groups_of_compositions_and_of_marginal_statements():
    assert statement(group(compose(A, B), 2)) == pytest.approx(
        (1.5, 1e-6 * (1 + math.exp(0.75)), 0.14, 0.94), rel=1e-10
    )
    assert statement(group(M, 3)) == pytest.approx((3.0, 0.0, 0.3, MARGINALLY), rel=1e-12)
    # The doubt about the samples does not grow with the group, so it must not be folded into gamma.
    mixed = group(compose(A, M), 2)
    assert mixed.gamma == pytest.approx(2 * 0.05 + 0.01 + 2 * 0.1, rel=1e-12)
    assert mixed.confidence is None


@pytest.mark.parametrize("size", [0, -1])
def test_group_size_out_of_range(size):
    with pytest.raises(ValueError, match=f"size must be .* got {size}"):
        group(A, size)


def test_group_size_must_be_an_integer():
    with pytest.raises(TypeError, match="size must be"):
        group(A, 2.0)


# Post-processing.


def test_post_processing_costs_nothing():
    release = Release(jnp.array([1.5, -2.0]), A)
    made = post_process(release, jnp.abs)
    assert made.value.tolist() == [1.5, 2.0]
    assert made.guarantee is A
    jitted = jax.jit(lambda release: post_process(release, lambda x: {"sum": x.sum()}))(release)
    assert float(jitted.value["sum"]) == -0.5
    for bad in ((A, jnp.abs), (release, 1.0)):
        with pytest.raises(TypeError, match="must be a"):
            post_process(*bad)


# Arguments.


def test_jitted_guarantees_compose():
    jitted = jax.jit(lambda guarantee: guarantee)(A)
    assert jitted.gamma.dtype == jnp.float32
    together = compose(A, jitted)
    assert all(isinstance(x, float) for x in jax.tree.leaves(together))
    assert statement(together) == pytest.approx((1.0, 2e-6, 0.05, 0.99), rel=1e-6)
    assert len(together.events) == 1


@pytest.mark.parametrize("gamma", [0.01, 0.05])
def test_copies_of_one_event_count_at_their_worst(gamma):
    # Rounded to float32, .99 and .05 grow and .01 shrinks.
    one = sampled(1.0, gamma, 0.99, "a")
    rounded = jax.jit(lambda guarantee: guarantee)(one)
    for together in (compose(one, rounded), compose(rounded, one)):
        assert together.gamma >= gamma
        assert together.confidence <= 0.99


def test_a_bad_traced_parameter_never_becomes_a_finite_promise():
    mechanism = jax.jit(lambda sensitivity: dpjax.laplace(sensitivity, 1.0))(0.0)
    bad = mechanism.guarantee
    assert math.isnan(bad.epsilon)
    for function in (
        compose,
        lambda g: group(g, 2),
        lambda g: under_distribution_shift(g, kl=0.1, n=5),
    ):
        with pytest.raises(ValueError, match="must not be NaN"):
            function(bad)


def test_batches_are_refused():
    grid = jax.vmap(lambda epsilon: dpjax.laplace(1.0, epsilon).guarantee)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"must be one number, got shape \(3,\)"):
        compose(grid)


def test_accounting_runs_on_the_host():
    for function in (
        compose,
        lambda g: group(g, 2),
        lambda g: under_distribution_shift(g, kl=0.1, n=5),
    ):
        with pytest.raises(TypeError, match="host"):
            jax.jit(function)(A)


@pytest.mark.parametrize("bad", [1.0, None, "a", (1.0, 0.0)])
def test_only_guarantees_compose(bad):
    for function in (
        compose,
        lambda g: group(g, 2),
        lambda g: under_distribution_shift(g, kl=0.1, n=5),
    ):
        with pytest.raises(TypeError, match="Guarantee"):
            function(bad)


def test_nothing_composes_to_nothing():
    with pytest.raises(ValueError, match="none"):
        compose()


def test_group_of_no_guarantee_is_none():
    nothing = dpjax.laplace(1.0, 1.0, noise="float").guarantee
    assert dpjax.accounting.group(nothing, 2).epsilon == float("inf")
    assert "no guarantee" in repr(dpjax.accounting.group(nothing, 2))
