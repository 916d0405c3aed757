"""The values: how they print, and that they are frozen pytrees."""

import dataclasses
import pickle
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import Guarantee, NeighboringRelation, OperatingPoint, Release, SampledEvent, Sensitivity
from dpjax._core._pytree import TreeSpec

EVENT = SampledEvent(0.05, 0.99, "a")
SAMPLED = Guarantee(1.0, 0.0, 0.05, 0.99, (EVENT,))
MARGINAL = Guarantee(1.0, 0.0, 0.05, None, (SampledEvent(0.05, None, "b"),))
ASSUMED = dpjax.assume_sensitivity(0.01, norm="l1", n=100)
ESTIMATE = Sensitivity(
    0.033,
    0.05,
    0.99,
    "l2",
    100,
    m=900,
    k=871,
    method="exact",
    identity="c",
    target="d",
    records=TreeSpec.of({"x": jnp.zeros((100, 3)), "y": (jnp.zeros(100, int),)}),
    outputs=TreeSpec.of(jnp.zeros(3)),
)
POINT = dpjax.operating_point(m=1500, gamma=0.1)
VALUES = [
    POINT,
    EVENT,
    SAMPLED,
    MARGINAL,
    ASSUMED,
    ESTIMATE,
    Release(np.array([0.5, -1.0]), SAMPLED),
    NeighboringRelation.REPLACE_ONE,
]
values = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)


@pytest.mark.parametrize(
    ("guarantee", "printed"),
    [
        (SAMPLED, "(epsilon=1, delta=0, gamma=0.05)-random DP, confidence 0.99, under replace-one"),
        (MARGINAL, "(epsilon=1, delta=0, gamma=0.05)-random DP, marginal, under replace-one"),
        (Guarantee(0.5, 1e-6), "(epsilon=0.5, delta=1e-06)-DP, under replace-one"),
        (
            Guarantee(0.5, relation=NeighboringRelation.ADD_OR_REMOVE_ONE, group_size=2),
            "(epsilon=0.5, delta=0)-DP, under add-or-remove-one, for groups of 2",
        ),
        (
            Guarantee(1.0, notes=("no noise", "averaged over positions")),
            "(epsilon=1, delta=0)-DP, under replace-one, no noise, averaged over positions",
        ),
        (
            Guarantee(1.0, gamma=0.05, confidence=0.99),
            "(epsilon=1, delta=0, gamma=0.05)-random DP, confidence 0.99, under replace-one",
        ),
    ],
)
def test_guarantees_print(guarantee, printed):
    assert repr(guarantee) == str(guarantee) == printed


def test_a_guarantee_of_nan_prints():
    guarantee = jax.jit(lambda epsilon: dpjax.laplace(1.0, epsilon).guarantee)(-1.0)
    printed = "(epsilon=nan, delta=nan, gamma=nan)-random DP, confidence nan, under replace-one"
    assert repr(guarantee) == printed


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (POINT, "m=1500, k=1377, gamma=0.1 (exact, confidence 0.99)"),
        (
            dpjax.operating_point(m=1500, gamma=0.1, confidence=None),
            "m=1500, k=1351, gamma=0.1 (exact, marginal)",
        ),
        (ASSUMED, "Sensitivity(0.01 in l1, n=100, replace-one; assumed)"),
        (
            dpjax.assume_sensitivity(2, norm="linf"),
            "Sensitivity(2 in linf, any n, replace-one; assumed)",
        ),
        (
            ESTIMATE,
            "Sensitivity(0.033 in l2, n=100, replace-one; exact, m=900, k=871, gamma=0.05,"
            " confidence 0.99)",
        ),
        (
            dataclasses.replace(ESTIMATE, confidence=None, positions="each"),
            "Sensitivity(0.033 in l2, n=100, replace-one; exact, m=900, k=871, gamma=0.05,"
            " marginal, positions=each)",
        ),
        (
            Release(0.5, SAMPLED),
            "Release(0.5, (epsilon=1, delta=0, gamma=0.05)-random DP, confidence 0.99,"
            " under replace-one)",
        ),
        (NeighboringRelation.REPLACE_ONE, "replace-one"),
        (NeighboringRelation.ADD_OR_REMOVE_ONE, "add-or-remove-one"),
    ],
)
def test_the_other_values_print(value, printed):
    assert str(value) == printed


@values
def test_every_value_prints_in_one_line(value):
    for text in (str(value), repr(value)):
        assert "\n" not in text
        assert "object at 0x" not in text


def test_a_function_prints_by_its_name():
    def largest_jump(difference):
        return jnp.max(jnp.abs(difference))

    assert "in largest_jump," in repr(dpjax.assume_sensitivity(1.0, norm=largest_jump))


def test_a_grid_of_guarantees_prints():
    grid = jax.vmap(lambda epsilon: dpjax.laplace(1.0, epsilon).guarantee)(jnp.array([0.5, 1.0]))
    assert repr(grid).startswith("(epsilon=[0.5 1], delta=[0 0]")


@pytest.mark.parametrize(
    ("guarantee", "printed"),
    [
        (Guarantee(2.0000004), "(epsilon=2.00001, delta=0)-DP, under replace-one"),
        (Guarantee(0.7, 1.2345671e-8), "(epsilon=0.7, delta=1.23457e-08)-DP, under replace-one"),
        (
            Guarantee(1e-300, 0.0, 1 / 3, 0.98999951),
            "(epsilon=1e-300, delta=0, gamma=0.333334)-random DP, confidence 0.989999,"
            " under replace-one",
        ),
        (
            # A float32 prints as the number that it was made of.
            Guarantee(*map(np.float32, (0.7, 1e-5, 0.05, 0.99))),
            "(epsilon=0.7, delta=1e-05, gamma=0.05)-random DP, confidence 0.99, under replace-one",
        ),
        (
            Guarantee(np.array([2.0000004, 0.1]), 0.0, 0.1, np.array([0.98999951, 0.5])),
            "(epsilon=[2.00001 0.1], delta=0, gamma=0.1)-random DP, confidence [0.989999 0.5],"
            " under replace-one",
        ),
        # Sums of decimals, a unit or two in the last place above them.
        (Guarantee(0.1 + 0.2, 1.2e-6 - 1e-6), "(epsilon=0.3, delta=2e-07)-DP, under replace-one"),
        (
            dpjax.accounting.compose(*[Guarantee(0.1, gamma=0.05, confidence=0.99)] * 3),
            "(epsilon=0.3, delta=0, gamma=0.15)-random DP, confidence 0.97, under replace-one",
        ),
        (
            dpjax.accounting.compose(*[Guarantee(0.1)] * 10),
            "(epsilon=1, delta=0)-DP, under replace-one",
        ),
        (Guarantee(0.3 * (1 + 2**-49)), "(epsilon=0.300001, delta=0)-DP, under replace-one"),
    ],
)
def test_guarantees_print_rounded_outward(guarantee, printed):
    assert repr(guarantee) == printed


@given(st.floats(1e-20, 1e20), st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None, derandomize=True, report_multiple_bugs=False)
def test_no_printed_number_claims_more(epsilon, confidence):
    """Python prints the shortest decimal of a float: that counts as exact, to a part of 2^-50."""
    slack = 1 - Decimal(2) ** -50
    text = repr(Guarantee(epsilon, 0.5, 0.5, confidence))
    shown_epsilon = text.removeprefix("(epsilon=").partition(",")[0]
    assert Decimal(shown_epsilon) >= Decimal(repr(epsilon)) * slack
    assert float(shown_epsilon) <= epsilon * (1 + 1e-5)
    shown = text.rpartition("confidence ")[2].partition(",")[0]
    assert Decimal(shown) * slack <= Decimal(repr(confidence))
    assert float(shown) >= confidence * (1 - 1e-5)


def test_an_operating_point_prints_gamma_rounded_up():
    point = dpjax.operating_point(m=100)
    assert Decimal(str(point).partition("gamma=")[2].partition(" ")[0]) >= Decimal(point.gamma)


@pytest.mark.parametrize("confidence", [0.5, None])
def test_doubt_about_the_samples_always_prints(confidence):
    # Without events and at gamma 0 it still is no guarantee of differential privacy.
    text = repr(Guarantee(1.0, gamma=0.0, confidence=confidence))
    assert ("confidence 0.5" if confidence else "marginal") in text


@pytest.mark.parametrize("confidence", [1 - 1e-8, 1 - 1e-12])
def test_a_confidence_below_one_never_prints_as_one(confidence):
    printed = repr(Guarantee(1.0, gamma=0.05, confidence=confidence)).rpartition("confidence ")[2]
    assert float(printed.partition(",")[0]) < 1


@values
def test_values_are_frozen(value):
    if isinstance(value, NeighboringRelation):
        pytest.skip("an enumeration")
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 0.0)


def same(value, other):
    """Equal leaf by leaf; frozen pytrees themselves compare by identity."""
    leaves, structure = jax.tree.flatten(value)
    other_leaves, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        np.array_equal(x, y) for x, y in zip(leaves, other_leaves, strict=True)
    )


@values
def test_pytrees_round_trip(value):
    if isinstance(value, (OperatingPoint, NeighboringRelation)):
        pytest.skip("not a pytree")
    leaves, structure = jax.tree.flatten(value)
    assert same(value, jax.tree.unflatten(structure, leaves))


@values
def test_pickles_round_trip(value):
    again = pickle.loads(pickle.dumps(value))
    plain = isinstance(value, (OperatingPoint, NeighboringRelation))  # Compared by value.
    assert again == value if plain else same(again, value)


# As float32: .05 rounded up, .99 down.
GAMMA, BELOW = float(np.float32(0.05)), float(np.nextafter(np.float32(0.99), np.float32(0)))


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (SAMPLED, [1.0, 0.0, GAMMA, BELOW, GAMMA, BELOW]),
        (MARGINAL, [1.0, 0.0, GAMMA, GAMMA]),
        (ESTIMATE, [0.033, GAMMA, BELOW]),
    ],
)
def test_numbers_are_leaves_and_the_rest_is_static(value, leaves):
    assert jax.tree.leaves(value) == leaves


def test_values_pass_through_jit():
    guarantee, sensitivity = jax.jit(lambda *values: values)(SAMPLED, ESTIMATE)
    assert repr(guarantee) == repr(SAMPLED).replace("0.99", "0.989999")
    assert repr(sensitivity) == repr(ESTIMATE).replace("0.99", "0.989999")
    assert guarantee.events[0].identity == "a"
    assert (sensitivity.records, sensitivity.k) == (ESTIMATE.records, 871)


def test_frozen_pytrees_are_hashable():
    assert isinstance(hash(SAMPLED), int)  # jit(mechanism) needs it.


def test_specs_describe_trees():
    spec = TreeSpec.of({"x": jnp.zeros((3, 2)), "y": jnp.zeros(3, int)})
    assert repr(spec) == "{'x': 'float32[3, 2]', 'y': 'int32[3]'}"
    assert spec == TreeSpec.of({"x": jnp.ones((3, 2)), "y": jnp.ones(3, int)})
    assert hash(spec) == hash(TreeSpec.of(spec.tree()))
    assert spec != TreeSpec.of({"x": jnp.zeros((3, 2)), "z": jnp.zeros(3, int)})
    assert spec != TreeSpec.of({"x": jnp.zeros((3, 1)), "y": jnp.zeros(3, int)})
    assert spec != TreeSpec.of({"x": jnp.zeros((3, 2)), "y": jnp.zeros(3)})
    assert TreeSpec.of((jnp.zeros(2), jnp.zeros(3))).argument(1) == TreeSpec.of(jnp.zeros(3))


# Bounds from analysis.


def test_an_assumed_sensitivity_has_gamma_zero_and_confidence_one():
    assert (ASSUMED.gamma, ASSUMED.confidence, ASSUMED.method) == (0.0, 1.0, "assumed")
    assert ASSUMED.identity is ASSUMED.m is ASSUMED.k is ASSUMED.target is None


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_analytic_bounds_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=f"value must be .* got {value}"):
        dpjax.assume_sensitivity(value, norm="l1")


@pytest.mark.parametrize("value", ["1", None, True, [1.0], 1j])
def test_analytic_bounds_must_be_numbers(value):
    with pytest.raises(TypeError, match="value"):
        dpjax.assume_sensitivity(value, norm="l1")


def test_analytic_sensitivity_refuses_the_rest():
    with pytest.raises(ValueError, match="norm must be"):
        dpjax.assume_sensitivity(1.0, norm="l3")
    with pytest.raises(ValueError, match=r"n must be .* got 0"):
        dpjax.assume_sensitivity(1.0, norm="l1", n=0)
    with pytest.raises(TypeError, match="relation must be"):
        dpjax.assume_sensitivity(1.0, norm="l1", relation="replace-one")


def test_zero_bound_must_be_asked_for_by_name():
    sensitivity = dpjax.assume_sensitivity(0, norm="l1", allow_zero=True)
    assert "no noise" in repr(dpjax.laplace(sensitivity, 1.0).guarantee)


def test_a_bad_traced_bound_becomes_nan():
    def bound(value):
        return dpjax.assume_sensitivity(value, norm="l1").value

    for value in (0.0, -1.0, np.inf, np.nan):
        assert np.isnan(jax.jit(bound)(value))
    assert float(jax.jit(bound)(0.5)) == 0.5
    assert float(jax.jit(bound)(2)) == 2.0
