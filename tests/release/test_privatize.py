"""From target and mechanism to releases: what is refused, and that nothing else is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Sensitivity
from dpjax.sensitivity._pairs import RandomPair
from tables import no_refusal

N = 10


def mean(database):
    return jnp.mean(database["x"])


def oracle(key, n):
    key_x, key_c = jax.random.split(key)
    return {
        "x": jax.random.uniform(key_x, (n,)),
        "c": jax.random.randint(key_c, (n,), 0, 5),
    }


def database(n=N):
    return {"x": np.linspace(0, 1, n), "c": np.arange(n)}


def without_sampling(key, target, oracle, n):
    """What `sample_sensitivity` returns, but for the numbers: traced, not sampled."""
    sampler = RandomPair.trace(key, target, oracle, n=n, norm="l1", positions="last")
    made = Sensitivity(0.1, 0.05, 0.99, "l1", n, m=90, k=90, method="exact", identity="fixed")
    return dataclasses.replace(
        made,
        target=sampler.target.fingerprint,
        records=sampler.records,
        outputs=sampler.target.outputs,
    )


@pytest.fixture(scope="module")
def sampled(keys):
    return without_sampling(keys(1), mean, oracle, N)


@pytest.fixture(scope="module")
def private(sampled):
    return dpjax.privatize(mean, dpjax.laplace(sampled, epsilon=1.0))


def test_release_is_that_of_the_mechanism(private, sampled, key):
    release = private(key, database())
    direct = dpjax.laplace(sampled, epsilon=1.0)(key, np.float32(0.5))
    assert float(release.value) == pytest.approx(float(direct.value), abs=1e-6)
    assert repr(release.guarantee) == repr(direct.guarantee)
    assert release.guarantee.gamma == sampled.gamma
    assert release.guarantee.confidence == 0.99


# Refusals: public facts only.


def test_a_private_function_says_what_it_is(private):
    text = repr(private)
    assert text.startswith("PrivateFunction(mean, AdditiveMechanism((epsilon=1, ")
    assert "Sensitivity(0.1 in l1, n=10" in text


def test_another_target_is_refused(sampled):
    mechanism = dpjax.laplace(sampled, 1.0)
    with pytest.raises(ValueError, match="target must be the target that was sampled"):
        dpjax.privatize(lambda database: jnp.sum(database["x"]), mechanism)
    with pytest.raises(ValueError, match="target must be the target that was sampled"):
        dpjax.privatize(lambda database: 2 * mean(database), mechanism)
    with pytest.raises(TypeError, match="target must be a function"):
        dpjax.privatize(3.0, mechanism)


@pytest.mark.parametrize("field", ["records", "target"])
def test_a_proof_that_lost_its_target_is_refused(field):
    """It is about clamped records of one function, and would pass for a bound on any other."""
    proved = dpjax.prove_sensitivity(
        jnp.mean, jax.ShapeDtypeStruct((N,), jnp.float32), bounds=(0, 1), norm="l1"
    )
    mechanism = dpjax.laplace(dataclasses.replace(proved, **{field: None}), 1.0)
    with pytest.raises(ValueError, match="target"):
        dpjax.privatize(jnp.sum, mechanism)


def test_same_program_under_another_name_is_accepted(sampled):
    dpjax.privatize(lambda records: jnp.mean(records["x"]), dpjax.laplace(sampled, 1.0))


def test_another_constant_in_the_target_is_refused(key):
    def make(weights):
        return lambda records: jnp.dot(records, jnp.asarray(weights)) / 4

    one = make([1.0, 1.0, 1.0, 1.0])
    made = without_sampling(key, one, lambda key, n: jax.random.uniform(key, (n,)), 4)
    mechanism = dpjax.laplace(made, 1.0)
    dpjax.privatize(make([1.0, 1.0, 1.0, 1.0]), mechanism)
    with pytest.raises(ValueError, match="a constant in it or"):
        dpjax.privatize(make([1.0, 1.0, 1.0, 100.0]), mechanism)


@pytest.mark.parametrize("n", [N - 1, N + 1, 1])
def test_another_size_is_refused(n, private, key):
    with pytest.raises(ValueError, match=f"database must have n={N} records, .* got {n}"):
        private(key, database(n))


def test_another_size_than_that_of_an_assumed_bound_is_refused(key):
    bound = dpjax.assume_sensitivity(1 / N, norm="l1", n=N)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(bound, 1.0))
    private(key, np.zeros(N))
    with pytest.raises(ValueError, match=f"n={N} records"):
        private(key, np.zeros(N + 1))


@pytest.mark.parametrize(
    "strange",
    [
        {"x": np.zeros(N)},
        {"x": np.zeros(N), "c": np.zeros(N, int), "d": np.zeros(N)},
        {"x": np.zeros((N, 2)), "c": np.zeros(N, int)},
        {"x": np.zeros(N - 1), "c": np.zeros(N, int)},
        {"x": 0.5, "c": np.zeros(N, int)},
        np.zeros(N),
        {},
        {"x": np.zeros(N), "c": np.array(["a"] * N)},
    ],
    ids=[
        "field missing",
        "field added",
        "wider",
        "ragged",
        "a number",
        "no dict",
        "empty",
        "texts",
    ],
)
def test_another_structure_is_refused(strange, private, key):
    with pytest.raises(ValueError, match="database must"):
        private(key, strange)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": np.zeros(N), "c": np.zeros(N)},
        {"x": np.zeros(N), "c": np.zeros(N, bool)},
        {"x": np.zeros(N), "c": np.zeros(N, "uint8")},
        {"x": np.zeros(N, complex), "c": np.zeros(N, int)},
    ],
)
def test_another_kind_of_number_is_refused(fields, private, key):
    with pytest.raises(TypeError, match="database must"):
        private(key, fields)


def test_keys_are_no_records(key):
    private = dpjax.privatize(lambda x: jnp.float32(len(x)), dpjax.laplace(1.0, 1.0))
    with pytest.raises(TypeError, match="database must contain real numbers"):
        private(key, jax.random.split(key, 3))


def test_a_private_function_is_frozen(private):
    with pytest.raises(AttributeError, match="cannot assign"):
        private.mechanism = dpjax.laplace(0.1, 1e9)


def test_keys_are_checked_before_anything_else(private):
    with pytest.raises(TypeError, match="typed JAX key"):
        private(0, database())


# What is accepted: other widths of the same kind, and any values.


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("integer", ["int64", "int32", "int8"])
def test_numpy_data_of_any_width_fit(dtype, integer, private, key):
    fields = {"x": np.ones(N, dtype), "c": np.arange(N, dtype=integer)}
    assert private(key, fields).value == private(key, {"x": np.ones(N), "c": np.arange(N)}).value


@pytest.mark.parametrize("value", [1e300, -1e300, np.inf, 1e39])
def test_floats_out_of_range_saturate(value, key):
    private = dpjax.privatize(jnp.max, dpjax.laplace(1e30, 1.0))
    limit = float(np.finfo("float32").max)
    ordinary = private(key, np.full(3, np.clip(value, -limit, limit), "float32"))
    assert private(key, np.full(3, value)).value == ordinary.value
    assert np.isfinite(ordinary.value)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf, 1e300])
def test_strange_records_are_released_like_any_other(strange, private, key):
    ordinary, odd = database(), database()
    odd["x"][3] = strange
    release, other = private(key, odd), private(key, ordinary)
    assert np.isfinite(release.value)
    assert jax.tree.structure(release) == jax.tree.structure(other)
    assert repr(release.guarantee) == repr(other.guarantee)


# Programs.


def test_jitted_and_eager_releases_are_the_same(private, key):
    records = jax.tree.map(jnp.asarray, database())
    eager, jitted = private(key, records), jax.jit(private)(key, records)
    assert float(eager.value) == pytest.approx(float(jitted.value), rel=1e-6)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    # In float32 it is rounded outward.
    assert repr(jitted.guarantee) == repr(eager.guarantee).replace("0.99", "0.989999")


def test_a_mechanism_that_jit_returned_serves_inside_of_another_jit(key):
    mechanism = jax.jit(lambda epsilon: dpjax.laplace(1.0, epsilon))(1.0)
    private, numbers = dpjax.privatize(jnp.sum, mechanism), jnp.arange(3.0)
    inside = jax.jit(lambda key, numbers: private(key, numbers).value)
    with no_refusal(jax.errors.TracerBoolConversionError):
        found = inside(key, numbers)
    np.testing.assert_array_equal(found, private(key, numbers).value)


def test_vmap_over_keys(private, key):
    many = jax.random.split(key, 5)
    batch = jax.vmap(private, (0, None))(many, database())
    one_by_one = [float(private(one, database()).value) for one in many]
    np.testing.assert_allclose(batch.value, one_by_one, rtol=1e-6)
    assert len(set(one_by_one)) == 5


def test_second_release_does_not_trace_the_target_again(sampled, keys):
    traces = []

    def counted(records):
        traces.append(1)
        return mean(records)

    private = dpjax.privatize(counted, dpjax.laplace(sampled, 1.0))
    before = len(traces)
    for i in range(3):
        private(keys(i), database())
    assert len(traces) == before


def test_database_may_be_any_pytree(key):
    def target(records):
        images, (flags,) = records
        return {"light": jnp.mean(images), "flagged": jnp.sum(flags)}

    private = dpjax.privatize(target, dpjax.laplace(1.0, 1.0))
    release = private(key, (np.zeros((3, 8, 8)), [np.array([True, False, True])]))
    assert release.value["flagged"].dtype == "int32"
    assert release.value["light"].dtype == "float32"


def test_sensitivity_sampled_under_x64_is_refused_without(key):
    with jax.enable_x64(True):
        sampled = without_sampling(key, mean, oracle, N)
        assert sampled.outputs.leaves[0].dtype == "float64"
        mechanism = dpjax.laplace(sampled, 1.0)
        release = dpjax.privatize(mean, mechanism)(key, database())
        assert release.value.dtype == "float64"
    with pytest.raises(ValueError, match="target must be the target that was sampled"):
        dpjax.privatize(mean, mechanism)


def test_private_function_made_without_x64_is_refused_under_it(private, key):
    private(key, database())
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX's configuration"):
        private(key, database())


TIMES = np.linspace(29, 37, N, dtype=np.float32)


def uniform(key, n):
    return jax.random.uniform(key, (n,))


def mean_of_times(x):
    """XLA takes the large number away, if it does not compute with each constant by itself."""
    return jnp.mean((x + 1e9) - 1e9)


@pytest.fixture(scope="module")
def private_times(keys):
    """Less noise than one operation rounds by."""
    sampled = without_sampling(keys(0), mean_of_times, uniform, N)
    return dpjax.privatize(mean_of_times, dpjax.laplace(sampled, 1e9))


INSIDE = {
    "an argument": lambda f, key, x: jax.jit(f)(key, x),
    "closed over": lambda f, key, x: jax.jit(lambda key: f(key, x))(key),
    "all is public": lambda f, key, x: jax.jit(lambda: f(key, x))(),
    "made of a constant": lambda f, key, x: jax.jit(lambda key: f(key, 2 * jnp.asarray(x / 2)))(
        key
    ),
    "many keys": lambda f, key, x: jax.jit(jax.vmap(lambda key: f(key, x)))(key[None])[0],
    "a loop": lambda f, key, x: jax.jit(
        lambda keys: jax.lax.scan(lambda c, key: (c, f(key, x)), 0, keys)[1]
    )(key[None])[0],
    "a branch": lambda f, key, x: jax.jit(
        lambda key, p: jax.lax.cond(p, lambda: f(key, x), lambda: 0.0)
    )(key, True),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_target_rounds_inside_of_a_program_as_it_does_alone(name, private_times, key):
    alone = private_times(key, TIMES).value
    assert abs(alone - np.mean(TIMES)) < 1e-4
    release = lambda key, x: private_times(key, x).value  # noqa: E731
    assert INSIDE[name](release, key, TIMES) == alone
    if name == "closed over":  # What JAX does by itself.
        assert abs(jax.jit(lambda: mean_of_times(jnp.asarray(TIMES)))() - alone) > 1


def test_operation_by_operation_the_target_is_another_one(private_times, key, keys):
    with jax.disable_jit():
        with pytest.raises(ValueError, match="JAX's configuration"):
            private_times(key, TIMES)
        sampled = without_sampling(keys(0), jnp.mean, uniform, N)
        dpjax.privatize(jnp.mean, dpjax.laplace(sampled, 1.0))(key, TIMES)
    with pytest.raises(ValueError, match="target must be the target that was sampled"):
        dpjax.privatize(jnp.mean, dpjax.laplace(sampled, 1.0))


THRESHOLD = 0.5


def above(x):
    return x > THRESHOLD


@pytest.mark.parametrize(
    ("query", "is_kept"),
    [
        (dpjax.queries.histogram_query(np.linspace(0, 1, 30)), True),
        (dpjax.queries.contingency_query({"x": 2, "c": 5}), True),
        (dpjax.queries.sum_query(lower=0, upper=1, capacity=9), True),
        (dpjax.queries.counting_query(lambda x: x > 0.5), True),
        (dpjax.queries.counting_query(above), False),
    ],
    ids=["histogram", "table", "sum", "a predicate", "a predicate that may change"],
)
def test_a_query_is_traced_once_unless_it_may_change(query, is_kept, key):
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1.0))
    columns = {"x": np.zeros(9, int), "c": np.zeros(9, int)}
    records = columns if len(query.shape) == 2 else np.zeros(9)
    programs = []
    for _ in range(2):
        private(key, records)
        _, kind = private._read(records)
        programs.append(private._traced(kind))
    assert (programs[0] is programs[1]) == is_kept


def test_a_predicate_that_was_replaced_is_looked_at_anew(key, monkeypatch):
    query = dpjax.queries.counting_query(above)
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1e4))
    records = np.array([0.2, 0.4, 0.6])
    assert private(key, records).value == 1
    monkeypatch.setitem(globals(), "THRESHOLD", 0.3)
    assert private(key, records).value == 2
    above.__code__, code = (lambda x: x > 0.0).__code__, above.__code__
    assert private(key, records).value == 3
    above.__code__ = code
    assert private(key, records).value == 2


def test_a_predicate_that_draws_is_traced_anew_when_keys_are_made_otherwise(key):
    query = dpjax.queries.counting_query(lambda x: x > jax.random.uniform(jax.random.key(0)))
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1.0))
    records = jnp.linspace(0, 1, 9)
    private(key, records)
    with jax.default_prng_impl("rbg"), pytest.raises(ValueError, match="draw with rbg keys"):
        private(key, records)
    private(key, records)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Person:
    age: jax.Array

    def any(self):
        return above(self.age)


def test_a_method_of_records_may_change(key, monkeypatch):
    query = dpjax.queries.counting_query(lambda person: person.any())
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1e4))
    people = Person(jnp.array([0.2, 0.4, 0.6]))
    assert private(key, people).value == 1
    monkeypatch.setitem(globals(), "THRESHOLD", 0.3)
    assert private(key, people).value == 2
