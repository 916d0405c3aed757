"""Guarantees written by hand are guarantees; what JAX makes of them is its own business."""

import contextlib
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Guarantee, SampledEvent
from dpjax._core._guarantee import concrete
from dpjax._core._release import guarantee_from_json, guarantee_to_json

SAMPLED = Guarantee(1.0, 0.0, 0.05, 0.99, (SampledEvent(0.05, 0.99, "a"),))
BAD_NUMBERS = [
    ("epsilon", -5.0),
    ("epsilon", float("nan")),
    ("epsilon", np.float32(-1e-30)),
    ("epsilon", jnp.float32(-1)),
    ("epsilon", np.array([1.0, -1.0])),
    ("epsilon", -(10**400)),
    ("delta", -0.5),
    ("delta", 1.0000001),
    ("delta", np.float64("nan")),
    ("gamma", -1),
    ("gamma", 2),
    ("gamma", float("nan")),
    ("confidence", 2.0),
    ("confidence", -0.1),
    ("confidence", float("nan")),
]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_a_guarantee_refuses_what_is_none(name, value):
    """Composed, a negative number would pay for others."""
    with pytest.raises((ValueError, TypeError), match=f"{name} must be a number"):
        Guarantee(**{"epsilon": 1.0, name: value})
    with pytest.raises((ValueError, TypeError), match=f"{name} must be a number"):
        dataclasses.replace(SAMPLED, **{name: value})
    if name in ("gamma", "confidence"):
        with pytest.raises(ValueError, match=f"{name} must be a number"):
            SampledEvent(**{"gamma": 0.5, "confidence": 0.5, "identity": "a", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("epsilon", value) for value in (None, True, "1", 1j, object(), jnp.array(True))],
        *[("delta", value) for value in (None, False, b"0")],
        *[("gamma", value) for value in (None, "0.05")],
        ("confidence", "marginal"),
        ("relation", "add-or-remove-one"),
        ("group_size", 1.0),
        ("events", ("a",)),
    ],
)
def test_a_guarantee_refuses_what_is_of_another_type(name, value):
    with pytest.raises(TypeError, match=f"{name} must be"):
        Guarantee(**{"epsilon": 1.0, name: value})


def test_a_guarantee_is_for_groups_of_someone():
    with pytest.raises(ValueError, match=r"group_size must be .* got 0"):
        Guarantee(1.0, group_size=0)


@contextlib.contextmanager
def nothing_refused():
    try:
        yield
    except (TypeError, ValueError) as error:
        pytest.fail(f"refused: {error}")


def test_bad_traced_parameters_have_guarantees_of_nan():
    """Alone, in batches, under vmap, and on every way through a tree: marked, and never refused."""

    def promised(epsilon):
        return dpjax.laplace(1.0, epsilon).guarantee

    several = jnp.array([0.5, -1.0])
    with nothing_refused():
        made = [
            jax.jit(promised)(-1.0),
            jax.vmap(promised)(several),
            jax.vmap(lambda epsilon: dpjax.laplace(1.0, epsilon))(several).guarantee,
            jax.jit(dataclasses.replace)(jax.vmap(promised)(several)),
        ]
        again = [dataclasses.replace(guarantee, notes=("a note",)) for guarantee in made]
    for guarantee in (*made, *again, *jax.tree.map(np.asarray, again)):
        assert np.isnan(np.asarray(guarantee.epsilon).ravel()[-1])
        assert np.isnan(np.asarray(guarantee.delta).ravel()[-1])


def test_trees_of_a_guarantee_hold_anything():
    """Axes of vmap, shapes and sentinels of JAX stand where its numbers do."""
    with nothing_refused():
        axes = jax.tree.map(lambda _: -1, SAMPLED)
        batch = jax.tree.map(lambda x: jnp.full(2, x), SAMPLED)
        epsilons = jax.vmap(lambda one: one.epsilon, in_axes=(axes,))(batch)
        shapes = jax.eval_shape(lambda one: one, SAMPLED)
        nothing = jax.tree.map(lambda _: None, SAMPLED)
    assert (epsilons.shape, shapes.epsilon.shape, nothing.epsilon) == ((2,), (), None)


EQUAL = [
    Guarantee(1.0, 1e-6),
    Guarantee(jnp.float32(1), np.float64(1e-6)),
    Guarantee(np.array(1.0), 1e-6, jnp.zeros(())),
]
DIFFERENT = [
    Guarantee(1.0),
    Guarantee(1.0, 1e-6, 0.1),
    Guarantee(1.0, 1e-6, 0.0, None),
    Guarantee(1.0, 1e-6, relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE),
    Guarantee(1.0, 1e-6, notes=("seeded key",)),
    Guarantee(1.0, 1e-6, group_size=2),
    SAMPLED,
    dataclasses.replace(SAMPLED, events=(SampledEvent(0.05, 0.99, "b"),)),
]


def test_guarantees_are_equal_if_they_state_the_same():
    """Also what was saved, pickled, or went through a program: a restored one differed from itself.

    Every field counts. Those of tracers and of batches are equal to themselves alone.
    """
    assert len(set(EQUAL)) == 1
    assert len({*EQUAL, *DIFFERENT}) == 1 + len(DIFFERENT)
    for guarantee in (*EQUAL, *DIFFERENT):
        again = guarantee_from_json(json.loads(json.dumps(guarantee_to_json(concrete(guarantee)))))
        assert again == guarantee
        assert hash(again) == hash(guarantee)
        assert pickle.loads(pickle.dumps(again)) == again
        assert guarantee != (guarantee,)
    assert jax.jit(lambda: SAMPLED)() != SAMPLED  # Rounded outward to float32.
    whole = Guarantee(1.0, 0.5, 0.25, 0.5)
    assert jax.jit(lambda: whole)() == whole
    batch = Guarantee(jnp.ones(2))
    assert batch == batch
    assert batch != Guarantee(jnp.ones(2))

    @jax.jit
    def inside(epsilon):
        traced = Guarantee(epsilon)
        assert traced == traced != Guarantee(epsilon)
        assert hash(traced) != hash(Guarantee(epsilon))
        return traced

    assert inside(1.0) == Guarantee(1.0)
