"""Grids: what is computed, under which keys, and how it is labeled."""

import enum
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import dpjax


class Kind(enum.Enum):
    NEAR = 1
    FAR = 2


def identity(x):
    return x


def test_results_are_those_of_a_loop():
    """Bit for bit: releases, and arithmetic that no batch reorders."""
    key, epsilons = dpjax.random.seeded_key(0), [0.1, 1, 10.0]

    def error(key, epsilon, n):
        key_data, key_release = jax.random.split(key)
        value = jax.random.bits(key_data, (n,)).max() >> 8
        released = dpjax.laplace(1 / n, epsilon)(key_release, value.astype(jnp.float32))
        return {"error": released.value - value.astype(jnp.float32), "value": value}

    found = dpjax.sweep(
        key, error, traced={"epsilon": epsilons}, static={"n": [3]}, repeats=4, chunk_size=16
    )
    assert found.sizes == {"n": 1, "epsilon": 3, "repeat": 4}
    loop = jax.jit(error, static_argnames="n")
    for epsilon in epsilons:
        for repeat in range(4):
            one = dpjax.cell_key(key, {"n": 3, "epsilon": epsilon}, repeat=repeat)
            expected = loop(one, jnp.float32(epsilon), n=3)
            there = found.sel(n=3, epsilon=epsilon, repeat=repeat)
            assert there.error == expected["error"]
            assert there.value == expected["value"]
    assert len(np.unique(found.value)) == 12


def test_a_cell_has_the_same_bits_in_any_chunk(key):
    """In chunks of one size: sums, transcendental functions and products of its own arrays."""

    def statistics(key, x):
        values = jax.random.normal(key, (1000,))
        matrix = values[:900].reshape(30, 30)
        return jnp.stack([values.mean(), jnp.exp(values * x).sum(), (matrix @ matrix)[0, 0], x**3])

    xs = np.linspace(0.1, 3, 25)
    together = dpjax.sweep(key, statistics, traced={"x": xs}, repeats=3, chunk_size=16)
    alone = [
        dpjax.sweep(key, statistics, traced={"x": xs[i : i + 1]}, repeats=3, chunk_size=16)
        for i in range(25)
    ]
    xarray.testing.assert_equal(xarray.concat(alone, "x"), together)


def test_one_trace_and_one_program_for_each_choice(key, compilations):
    traces = []

    def function(key, x, n, kind):
        traces.append((n, kind))
        return jax.random.uniform(key, (n,)).sum() * x

    def swept(xs, **settings):
        static = {"n": [1, 2, 3], "kind": ["a", "b"]}
        return dpjax.sweep(
            key, function, traced={"x": xs}, static=static, repeats=5, chunk_size=16, **settings
        )

    choices = [(n, kind) for n in (1, 2, 3) for kind in "ab"]
    first = compilations(lambda: swept([1.0, 2.0]).value.values)
    # The kind makes no other program.
    assert first.count("jit(_compiled_rest)") == 3
    # An earlier test may have compiled this one: it is the same for all sweeps.
    assert first.count("jit(_compiled_keys)") <= 1
    assert traces == choices
    assert compilations(lambda: swept(np.linspace(0, 9, 33)).value.values) == []
    assert traces == 2 * choices


def test_more_of_everything_keeps_what_was_there(key, draw):
    small = dpjax.sweep(
        key, draw, traced={"x": [1, 2.5]}, static={"shift": [0]}, repeats=3, chunk_size=8
    )
    large = dpjax.sweep(
        key,
        draw,
        traced={"x": [7, 2.5, 1.0, 0.3]},
        static={"shift": [5, 0]},
        repeats=6,
        chunk_size=8,
    )
    there = large.sel(x=small.x, shift=small["shift"], repeat=small.repeat)
    np.testing.assert_array_equal(there.value, small.value)
    assert len(np.unique(large.value)) == 48


def test_the_order_of_parameters_does_not_matter(key):
    function = lambda key, **parameters: jax.random.bits(key)  # noqa: E731
    one = dpjax.sweep(key, function, traced={"a": [1, 2], "b": [3, 4]}, static={"c": ["x", "y"]})
    other = dpjax.sweep(key, function, traced={"c": [0], "b": [4, 3]}, static={"a": [2, 1]})
    swapped = dpjax.sweep(key, function, traced={"b": [4, 3], "a": [2, 1]}, static={"c": ["y"]})
    xarray.testing.assert_equal(
        swapped.value.transpose(*one.value.dims), one.value.sel(swapped.coords)
    )
    assert not np.isin(other.value, one.value).any()


def test_without_parameters_there_are_repeats(key, draw):
    found = dpjax.sweep(key, draw, repeats=3)
    assert found.sizes == {"repeat": 3}
    assert dpjax.sweep(key, draw).value.values == found.value[:1].values


def test_trees_of_arrays_are_traced_together(key):
    data = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([1, 0, 1])}
    batch = jax.vmap(lambda v: dpjax.assume_sensitivity(v, norm="l1"))(jnp.array([0.5, 2.0]))

    def function(key, data, sensitivity):
        scale = dpjax.laplace(sensitivity, 1.0).scale
        return data["x"].sum() + data["y"].astype(jnp.float32) + scale

    found = dpjax.sweep(key, function, traced={"data": data, "sensitivity": batch})
    np.testing.assert_array_equal(found.data, [0, 1, 2])
    np.testing.assert_array_equal(found.data_y, [1, 0, 1])
    np.testing.assert_array_equal(found.sensitivity_value, [0.5, 2.0])
    np.testing.assert_array_equal(found.sensitivity_gamma, [0.0, 0.0])
    np.testing.assert_allclose(found.value[:, 0, 0], [2.5, 5.5, 10.5])
    np.testing.assert_allclose(found.value[:, 1, 0] - found.value[:, 0, 0], 1.5)
    row = {"x": data["x"][1], "y": data["y"][1]}
    alone = jax.tree.map(lambda leaf: leaf[1], batch)
    bits = dpjax.sweep(
        key, lambda key, **_: jax.random.bits(key), traced={"data": data, "sensitivity": batch}
    )
    one = dpjax.cell_key(key, {"data": row, "sensitivity": alone})
    assert bits.value[1, 1, 0] == jax.random.bits(one)


LABELS = {
    "numbers": ([1, 2.5], [1, 2.5]),
    "booleans": ([True, False], [True, False]),
    "strings": (["a", "b"], ["a", "b"]),
    "a mixture": ([None, 3, "c", (1, 2)], ["None", "3", "c", "(1, 2)"]),
    "functions": ([identity, jnp.sin], ["identity", "sin"]),
    "an enumeration": (list(Kind), ["NEAR", "FAR"]),
    "a dict": ({"one": lambda x: x, "two": object()}, ["one", "two"]),
    "a range": (range(2), [0, 1]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_static_values_name_themselves(key, kind):
    (values, labels), seen = LABELS[kind], []

    def function(key, choice):
        seen.append(choice)
        return jax.random.bits(key)

    found = dpjax.sweep(key, function, static={"choice": values})
    assert seen == list(values.values() if isinstance(values, dict) else values)
    assert found.choice.values.tolist() == labels
    one = labels[1] if isinstance(values, dict) else list(values)[1]
    expected = jax.random.bits(dpjax.cell_key(key, {"choice": one}))
    assert found.value.sel(choice=labels[1]).item() == int(expected)


def test_outputs_are_named_by_where_they_are(key):
    mechanism = dpjax.randomized_response(1.0)

    def function(key, n):
        pair = (jnp.zeros(()), {"b": jnp.ones((2, 3), bool)})
        return {"pair": pair, "release": mechanism(key, jnp.int32([0, 1]))}

    found = dpjax.sweep(dpjax.random.seeded_key(0), function, static={"n": [1, 2]}, repeats=5)
    assert {name: dict(found[name].sizes) for name in found if "guarantee" not in name} == {
        "pair_0": {"n": 2, "repeat": 5},
        "pair_1_b": {"n": 2, "repeat": 5, "pair_1_b_dim_0": 2, "pair_1_b_dim_1": 3},
        "release_value": {"n": 2, "repeat": 5, "release_value_dim_0": 2},
    }
    assert found.pair_1_b.dtype == bool
    np.testing.assert_array_equal(found.release_guarantee_epsilon, np.ones((2, 5)))
    assert found.attrs["key"].startswith("seeded key, digest ")
    assert list(dpjax.sweep(key, lambda key: (1.0, 2.0))) == ["value_0", "value_1"]


def test_the_relation_of_each_choice_is_a_coordinate(key):
    """So a plot can tell apart curves that do not compare."""
    sensitivities = {
        relation.value: dpjax.queries.counting_query(lambda x: x > 0).sensitivity(
            "l1", relation=relation
        )
        for relation in dpjax.NeighboringRelation
    }

    def function(key, epsilon, sensitivity, n):
        return {"error": epsilon, "guarantee": dpjax.laplace(sensitivity, epsilon).guarantee}

    static = {"sensitivity": sensitivities, "n": [1, 2, 3]}
    found = dpjax.sweep(key, function, traced={"epsilon": [1.0, 2.0]}, static=static)
    assert found.relation.dims == ("sensitivity", "n")
    expected = np.broadcast_to(found.sensitivity.values[:, None], (2, 3))
    np.testing.assert_array_equal(found.relation.values, expected)
    alone = dpjax.sweep(key, functools.partial(function, sensitivity=1.0, n=1, epsilon=1.0))
    assert alone.relation.item() == "replace-one"
    without = dpjax.sweep(key, lambda key, relation: 1.0, static={"relation": ["a"]})
    assert without.relation.values.tolist() == ["a"]
    assert "relation" not in dpjax.sweep(key, lambda key: 1.0).coords


def test_attributes_and_units(key, draw):
    units = {"x": "m", "value": "kg", "repeat": "1"}
    found = dpjax.sweep(key, draw, traced={"x": [1, 2]}, repeats=3, units=units)
    assert {name: found[name].attrs["units"] for name in units} == units
    assert found.attrs["seconds"] > 0
    assert (found.attrs["cells_computed"], found.attrs["cells_found"]) == (6, 0)
    assert f"dpjax {dpjax.__version__}, jax {jax.__version__}" in found.attrs["versions"]
    assert found.attrs["key"].startswith("threefry2x32 key, digest ")
    assert found.attrs["backend"] == jax.default_backend()


def test_no_word_of_a_secure_key_is_kept(draw):
    key = dpjax.random.secure_key()
    found = dpjax.sweep(key, draw)
    assert found.attrs["key"].startswith("secure key, digest ")
    words = np.asarray(jax.random.key_data(key))
    shown = repr(found) + repr(found.attrs)
    assert not any(f"{word:x}" in shown or str(word) in shown for word in words.tolist())


def test_files_give_back_what_was_saved(key, tmp_path):
    def function(key, x, choice, data):
        bits = jax.random.bits(key, (2,))
        return {"bits": bits, "flag": bits[0] > 7, "real": x + data.sum()}

    found = dpjax.sweep(
        key,
        function,
        traced={"x": [0.1, 2], "data": np.eye(3)},
        static={"choice": ["a", None]},
        repeats=2,
        units={"x": "s"},
    )
    found.to_netcdf(tmp_path / "saved.nc")
    xarray.testing.assert_identical(xarray.load_dataset(tmp_path / "saved.nc"), found)
    found.to_zarr(tmp_path / "saved.zarr", consolidated=False)
    read = xarray.open_zarr(tmp_path / "saved.zarr", consolidated=False).load()
    xarray.testing.assert_identical(read, found)


REFUSED = {
    "a name": ({"traced": {"key": [1]}}, ValueError, "No name may be 'key' or 'repeat', got 'key'"),
    "no name": ({"static": {"a b": [1]}}, ValueError, "must be dicts from names of parameters"),
    "both": (
        {"traced": {"x": [1]}, "static": {"x": [2]}},
        ValueError,
        "traced or static, not both",
    ),
    "no list": ({"traced": {"x": 1.0}}, ValueError, "x must be a list of numbers"),
    "strings": ({"traced": {"x": ["a"]}}, ValueError, "pass other values in static"),
    "empty": ({"traced": {"x": []}}, ValueError, "at least 1"),
    "ragged": (
        {"traced": {"x": {"a": np.ones(2), "b": np.ones(3)}}},
        ValueError,
        "same number of values",
    ),
    "equal": (
        {"traced": {"x": [1, 0.5, 1.0]}},
        ValueError,
        "x must have distinct values, got 0 and 2",
    ),
    "rounded": ({"traced": {"x": [0.1, 0.1 + 1e-12]}}, ValueError, "treats them as the same value"),
    "one name": (
        {"traced": {"x": {"a_b": np.ones(2), "a": {"b": np.arange(2)}}}},
        ValueError,
        "x must give its numbers distinct names, got x_a_b, x_a_b",
    ),
    "a dimension": (
        {"traced": {"value_dim_0": [1]}, "function": lambda key, **_: jnp.ones(3)},
        ValueError,
        "names of the outputs' axes, got value_dim_0",
    ),
    "zeros": ({"traced": {"x": [0.0, -0.0]}}, ValueError, "treats them as the same value"),
    "NaN": ({"traced": {"x": [np.nan]}}, ValueError, "x must not contain NaN"),
    "keys": ({"traced": {"x": jax.random.key(0)[None]}}, TypeError, "x must be numbers, got keys"),
    "a large one": ({"traced": {"x": [2**40]}}, ValueError, "x must fit int32"),
    "no values": ({"static": {"x": []}}, ValueError, "at least one value"),
    "one string": ({"static": {"x": "abc"}}, TypeError, "x must be a list of values"),
    "no label": ({"static": {"x": [np.ones(2)]}}, TypeError, "give a dict from names to values"),
    "lambda": ({"static": {"x": [lambda: 0]}}, TypeError, "give a dict from names to values"),
    "one label": ({"static": {"x": [1, "1"]}}, ValueError, "treats them as the same value"),
    "repeats": ({"repeats": 0}, ValueError, "repeats must be"),
    "chunk size": ({"chunk_size": 0}, ValueError, "chunk_size must be"),
    "units": (
        {"units": {"y": "m"}},
        ValueError,
        "units must contain only the names repeat, value",
    ),
    "mesh": ({"mesh": 8}, TypeError, "mesh must be a jax.sharding.Mesh"),
    "function": ({"function": 3}, TypeError, "function must be a function"),
    "key": ({"key": 3}, TypeError, "key must be a typed JAX key"),
    "path": ({"path": "/no/such/place"}, ValueError, "must be in a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_grid_is_refused(key, name):
    changed, error, message = REFUSED[name]
    settings = {"key": key, "function": lambda key, **_: jax.random.bits(key), **changed}
    with pytest.raises(error, match=re.escape(message) if "." in message else message):
        dpjax.sweep(settings.pop("key"), settings.pop("function"), **settings)


FUNCTIONS = {
    "shapes": (lambda key, n: jnp.zeros(n), r"\(value: float32\[1\]\) at n=1 and .*\[2\]\) at n=2"),
    "dtypes": (
        lambda key, n: jnp.zeros((), "f4" if n == 1 else "i4"),
        "float32.*at n=1 and.*int32",
    ),
    "names": (lambda key, n: {f"a{n}": 1.0}, "a1: .* at n=1 and .a2: .* at n=2"),
    "dimensions": (lambda key, n: {"a": jnp.ones(2), "a_dim_0": 1.0}, "axes, got a_dim_0"),
    "parameters": (lambda key, n: {"n": 1.0}, "outputs must not have names of parameters: n"),
    "twice": (lambda key, n: {"a_b": 1.0, "a": {"b": 2.0}}, "distinct names, got a_b, a_b"),
}


def test_what_is_written_to_between_two_choices_is_refused(key):
    """Else both would be computed from what the last one left there."""
    buffer = np.zeros(3, np.float32)

    def function(key, n):
        buffer[:] = n
        return jax.random.uniform(key, (3,)) + buffer

    with pytest.raises(ValueError, match="function has changed since it was traced"):
        dpjax.sweep(key, function, static={"n": [1, 2]})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_that_do_not_fit_are_refused_before_work(key, name, tmp_path, monkeypatch):
    monkeypatch.setattr("dpjax.sweeps._sweep.Work._compute", None)
    function, message = FUNCTIONS[name]
    with pytest.raises(ValueError, match=message):
        dpjax.sweep(key, function, static={"n": [1, 2]}, path=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_it_runs_on_the_host(key, draw):
    with pytest.raises(TypeError, match="sweep runs on the host"):
        jax.jit(lambda key: dpjax.sweep(key, draw))(key)
    with pytest.raises(TypeError, match="x must not be traced, because sweep runs on the host"):
        jax.jit(lambda x: dpjax.sweep(key, draw, traced={"x": x}))(jnp.ones(2))


def test_the_same_bits_on_any_mesh(run_python):
    run_python(
        """
import jax, jax.numpy as jnp, dpjax, xarray
key = dpjax.random.seeded_key(0)
def function(key, x, n):
    key_data, key_release = jax.random.split(key)
    mean = jax.random.uniform(key_data, (n,)).mean()
    lie = dpjax.randomized_response(x)(key_release, jnp.int32([0, 1])).value
    return {"mean": mean * x, "lie": lie}
def swept(mesh=None, **settings):
    return dpjax.sweep(key, function, traced={"x": [1.0, 2.0, 3.0]}, static={"n": [4]},
                       repeats=7, chunk_size=4, mesh=mesh, **settings)
expected = swept()
for mesh in (jax.make_mesh((1,), ("a",)), jax.make_mesh((3,), ("a",))):
    xarray.testing.assert_equal(swept(mesh), expected)
import tempfile
with tempfile.TemporaryDirectory() as folder:
    xarray.testing.assert_equal(swept(mesh, path=folder + "/a"), expected)
    xarray.testing.assert_equal(swept(path=folder + "/a"), expected)
""",
        devices=3,
    )
