"""People with several examples: their gradients are averaged, and then clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import learning, queries
from dpjax.learning._fit import loss_of_person

TABLE = {
    "id": np.array([7, 8, 7, 9, 7, 8]),
    "x": np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 1.0], [9.0, 9.0], [2.0, 2.0]]),
    "y": np.array([1.0, 0.0, 2.0, 1.0, 5.0, 3.0]),
}
W = jnp.array([0.5, -0.25])


def loss(w, example):
    return (jnp.dot(w, example["x"]) - example["y"]) ** 2


def people(table=TABLE, rows=2, capacity=4):
    return queries.padded_people(table, person="id", rows=rows, capacity=capacity)


def only(keep):
    return {name: column[keep] for name, column in TABLE.items()}


def test_the_record_of_a_person_is_made_of_their_first_rows():
    found = people()
    assert found.present.tolist() == [True, True, True, False]
    assert found.records["there"].tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]
    assert found.records["rows"]["y"].tolist() == [[1, 2], [0, 3], [1, 0], [0, 0]]
    alone = people(only(TABLE["id"] == 8))
    for own, both in zip(
        jax.tree.leaves(alone.records), jax.tree.leaves(found.records), strict=True
    ):
        np.testing.assert_array_equal(own[0], both[1])


def test_people_stand_in_the_order_of_their_first_rows_and_have_an_order_of_their_own():
    table = {"id": np.array(["b", None, "a", "b"]), "day": np.array([2, 0, 1, 1])}
    found = queries.padded_people(table, person="id", rows=1, capacity=3, order="day")
    assert found.records["rows"].tolist() == [[1], [1], [0]]
    assert found.present.tolist() == [True, True, False]
    array = np.array([[7.0, 1.0, 2.0], [7.0, 3.0, 4.0]])
    for given in (array, jax.numpy.asarray(array)):
        found = queries.padded_people(given, person=0, rows=2, capacity=1)
        assert found.records["rows"].tolist() == [[[1, 2], [3, 4]]]
    alone = queries.padded_people({"id": array[:, 0]}, person="id", rows=2, capacity=1)
    assert alone.records["rows"] == {}
    with pytest.raises(
        ValueError, match="capacity must be enough for every database, got capacity=2 for 3"
    ):
        people(capacity=2)


def test_a_gradient_of_a_person_is_the_average_of_their_gradients():
    found = people()
    for i, rows in enumerate(([0, 2], [1, 5], [3])):
        person = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), found.records)
        examples = [{"x": jnp.asarray(TABLE["x"][j]), "y": TABLE["y"][j]} for j in rows]
        expected = np.mean([jax.grad(loss)(W, example) for example in examples], axis=0)
        np.testing.assert_allclose(jax.grad(loss_of_person(loss))(W, person), expected, rtol=1e-6)


def test_an_example_that_is_not_there_has_no_gradient_of_its_own():
    def infinite_at_zeros(w, example):
        return w[0] * jnp.log(jnp.sum(example["x"]))

    person = jax.tree.map(lambda leaf: jnp.asarray(leaf[2]), people().records)
    found = jax.grad(loss_of_person(infinite_at_zeros))(W, person)
    np.testing.assert_allclose(found, [np.log(2), 0], rtol=1e-6)


def test_all_examples_of_a_person_move_a_sum_by_one_clip_norm():
    clipped = learning.clipped_gradients(loss_of_person(loss), clip_norm=0.5)
    sums = []
    for keep in (TABLE["id"] > 0, TABLE["id"] != 7, TABLE["id"] != 8):
        slots = people(only(keep))
        records = jax.tree.map(jnp.asarray, slots.records)
        sums.append(np.asarray(clipped(W, records, slots.present).value))
    for without in sums[1:]:
        assert 0.49 < np.linalg.norm(sums[0] - without) <= 0.5 * (1 + 1e-6)


def test_a_training_on_people_says_whom_it_protects():
    how = {
        "optimizer": optax.sgd(0.1),
        "epochs": 1,
        "batch_size": 2,
        "clip_norm": 1.0,
        "noise_multiplier": 5.0,
        "delta": 1e-5,
    }
    key = dpjax.random.seeded_key(0)
    found = learning.fit(key, loss, W, database=TABLE, person="id", rows=2, most_people=4, **how)
    assert found.guarantee.privacy_unit == "person (id)"
    assert "at most 2 rows each, in 4 public slots" in str(found.guarantee)
    same = learning.fit(key, loss_of_person(loss), W, database=people(), **how)
    assert same.guarantee.privacy_unit == "record"
    assert found.guarantee.epsilon == same.guarantee.epsilon
    np.testing.assert_array_equal(found.value, same.value)
    for wrong, message in (
        ({"person": "id", "rows": 2}, "must be given with person"),
        ({"rows": 2}, "person must name the column of people"),
    ):
        with pytest.raises(TypeError, match=message):
            learning.fit(key, loss, W, database=TABLE, **wrong, **how)
    with pytest.raises(TypeError, match="database must be a table of rows"):
        learning.fit(key, loss, W, database=people(), person="id", rows=2, most_people=4, **how)
