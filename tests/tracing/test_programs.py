"""Traced programs: equal fingerprints make equal programs, and different ones do not."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

from dpjax import targets
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import Program, Unchanging

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)


def trace(function, *arguments):
    return Program.trace("target", function, *(arguments or (RECORDS,)))


def fingerprint(function, *arguments):
    return trace(function, *arguments).fingerprint


def scaled(factor):
    return lambda x: jnp.sum(x) * factor


def test_names_do_not_matter():
    def first(database):
        total = jnp.sum(database)
        return total * 2

    def second(other_name):
        return 2 * jnp.sum(other_name)

    @jax.jit
    def compiled(x):
        return x * 2

    @jax.jit
    def otherwise(y):
        return y * 2

    def swapped(x):
        return jnp.sum(x) * 2

    assert fingerprint(first) == fingerprint(swapped)
    assert fingerprint(compiled) == fingerprint(otherwise)
    assert fingerprint(first) != fingerprint(second)  # 2 * x is another program than x * 2.


def test_the_same_function_traced_anew():
    assert fingerprint(scaled(2.0)) == fingerprint(scaled(2.0))
    assert trace(scaled(2.0)) == trace(scaled(2.0))
    assert hash(trace(scaled(2.0))) == hash(trace(scaled(2.0)))
    assert trace(scaled(2.0)) != "a program"


def of_sine_and_cosine(x, function):
    """The same two operations first, whichever is used for what."""
    sine, cosine = jnp.sin(x), jnp.cos(x)
    return function(sine, cosine)


def drawn(x, partitionable):
    """Random numbers of a key that is no constant; the setting is no parameter of an operation."""
    words = jnp.stack([jnp.sum(x) * 0, 1]).astype(jnp.uint32)
    with jax.threefry_partitionable(partitionable):
        return jax.random.uniform(jax.random.wrap_key_data(words), (4,))


def computed_on(place, x):
    """By a `with` statement before jax 0.11, which no parameter shows, and by a call since."""
    try:
        context = compute_on(place)
    except TypeError:
        memory = jax.memory.Space.Device
        return compute_on(jnp.sin, compute_type=place, out_memory_spaces=memory)(x)
    with context:
        return jnp.sin(x)


def pay_and_draw(**facts):
    def target(x):
        with set_xla_metadata(**facts):
            return jnp.sin(x)

    return target


def precise(precision):
    def target(x):
        with jax.default_matmul_precision(precision):
            return x @ x

    return target


def in_float64(enabled):
    def target(x):
        with jax.enable_x64(enabled):
            return (x.astype(float) + 1).astype(jnp.float32)

    return target


DIFFERENT = {
    "literals": (scaled(2.0), scaled(3.0)),
    "nearly equal literals": (scaled(1.0), scaled(float(np.nextafter(np.float32(1), 2)))),
    "signs of zero": (scaled(0.0), scaled(-0.0)),
    "arrays": (scaled(np.ones(3, np.float32)), scaled(np.array([1, 1, 2], np.float32))),
    "large arrays": (
        scaled(np.zeros(5000, np.float32)),
        scaled(np.eye(1, 5000, 2500, np.float32)[0]),
    ),
    "operations": (jnp.sin, jnp.cos),
    "order of arguments": (lambda x: x - jnp.sum(x), lambda x: jnp.sum(x) - x),
    "order of operations": (lambda x: jnp.sin(jnp.cos(x)), lambda x: jnp.cos(jnp.sin(x))),
    "parameters": (lambda x: x.reshape(2, 2).sum(0), lambda x: x.reshape(2, 2).sum(1)),
    "dtypes": (lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.int16)),
    "outputs": (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
    "which result is used": (
        lambda x: of_sine_and_cosine(x, lambda sine, cosine: sine * 2 + cosine),
        lambda x: of_sine_and_cosine(x, lambda sine, cosine: cosine * 2 + sine),
    ),
    "which bits of a key are used": (
        lambda x: x * drawn(x, partitionable=True),
        lambda x: x * drawn(x, partitionable=False),
    ),
    "where it is computed": (lambda x: computed_on("device_host", x), lambda x: jnp.sin(x)),
    "what the compiler is told": (pay_and_draw(group=1), pay_and_draw(group=2)),
    "the precision of a product": (precise("float32"), precise("bfloat16")),
    "the dtype inside": (in_float64(True), in_float64(False)),
    "keys": (
        lambda x: jax.random.permutation(jax.random.key(0), x),
        lambda x: jax.random.permutation(jax.random.key(1), x),
    ),
    "inside jit": (jax.jit(scaled(2.0)), jax.jit(scaled(3.0))),
    "inside a loop": tuple(
        lambda x, f=f: lax.fori_loop(0, 3, lambda i, c: c * f, x) for f in (2.0, 3.0)
    ),
    "inside a branch": tuple(
        lambda x, f=f: lax.cond(x[0] > 0, lambda y: y * f, lambda y: y, x) for f in (2.0, 3.0)
    ),
    "the length of a scan": tuple(
        lambda x, n=n: lax.scan(lambda c, _: (c * 2, None), x, None, length=n)[0] for n in (3, 4)
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_a_program_computes_does_matter(what):
    first, second = DIFFERENT[what]
    assert fingerprint(first) == fingerprint(first)
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, lambda f: lambda x: lax.map(f, x)], ids=["alone", "loop"]
)
def test_what_nothing_depends_on_does_not_matter(wrap):
    def wasteful(x):
        jnp.log(jnp.cos(x))
        return jnp.sin(x)

    assert fingerprint(wrap(wasteful)) == fingerprint(wrap(lambda x: jnp.sin(x)))


def test_shapes_and_structure_matter():
    assert fingerprint(jnp.sum) != fingerprint(jnp.sum, jax.ShapeDtypeStruct((5,), jnp.float32))
    assert trace(lambda x: {"a": x}) != trace(lambda x: {"b": x})
    assert trace(lambda x: x["a"], {"a": RECORDS}) != trace(lambda x: x["b"], {"b": RECORDS})


def test_the_bits_of_a_nan_are_in_the_fingerprint():
    """Every NaN prints as one, but their signs can be told apart; arrays always went by bits."""

    def of(nan):
        return lambda x: jnp.sum(jnp.signbit(jnp.where(x > 0, nan, 1.0)), dtype=jnp.int32)

    one, other = (jax.jit(of(nan))(jnp.ones(4)) for nan in (np.nan, -np.nan))
    assert int(one) != int(other)
    assert fingerprint(of(np.nan)) != fingerprint(of(-np.nan))
    assert fingerprint(of(np.nan)) == fingerprint(of(np.nan))


def test_an_array_that_was_changed_in_place_matters():
    weights = np.ones(4, np.float32)

    def target(x):
        return x * weights

    before = fingerprint(target)
    weights[2] = 5.0
    assert fingerprint(target) != before


def test_a_program_that_changed_since_is_refused():
    weights = np.ones(4, np.float32)
    program = trace(lambda x: x * weights)
    program.check_unchanged("target")
    weights[2] = 5.0
    with pytest.raises(ValueError, match="target has changed since it was traced"):
        program.check_unchanged("target")


def test_a_program_notices_another_configuration():
    program = trace(jnp.sum)
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX's configuration"):
        program.check_unchanged("target")
    program.check_unchanged("target")


def host(factor):
    return lambda x: np.asarray(x) * factor


def from_host(function):
    return targets.host(function, output=RECORDS)


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["function", "partial"])
def test_host_functions_are_part_of_the_program(wrap):
    assert fingerprint(from_host(wrap(host(2.0)))) == fingerprint(from_host(wrap(host(2.0))))
    assert fingerprint(from_host(wrap(host(2.0)))) != fingerprint(from_host(wrap(host(3.0))))
    array = np.arange(3000.0, dtype=np.float32)
    other = np.where(array == 1500, 0, array)
    assert fingerprint(from_host(wrap(host(array)))) != fingerprint(from_host(wrap(host(other))))


def test_a_program_notices_that_code_on_the_host_has_changed():
    factors = [2.0]
    program = trace(from_host(lambda x: x * factors[0]))
    program.check_unchanged("target")
    factors[0] = 3.0
    with pytest.raises(ValueError, match=r"function on the host, .* has changed since"):
        program.check_unchanged("target")
    np.testing.assert_array_equal(program(jnp.ones(4)), np.full(4, 2.0))


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: lambda x: lax.map(lambda _: f(x), jnp.arange(2))],
    ids=["alone", "jit", "loop"],
)
def test_only_programs_that_call_the_host_know_an_origin(wrap):
    assert len(trace(wrap(jnp.sin)).jaxpr.jaxpr.invars) == 1
    assert len(trace(wrap(from_host(host(2.0)))).jaxpr.jaxpr.invars) == 2


def test_the_origin_is_no_input_that_is_used():
    target = from_host(host(2.0))
    assert trace(target).uses_input
    assert not trace(lambda x: target(jnp.ones(4))).uses_input


# Code that JAX knows nothing of: on a private database it could raise an error, or print.


def printing(x):
    jax.debug.print("{}", x)
    return x


def checking(x):
    checkify.check(jnp.all(x > 0), "not positive")
    return x


def debugging(x):
    jax.debug.callback(lambda _: None, x)
    return x


def calling_back(x):
    return jax.pure_callback(np.sin, RECORDS, x, vmap_method="broadcast_all")


RAW = {
    "pure_callback": calling_back,
    "io_callback": lambda x: io_callback(np.sin, RECORDS, x),
    "debug_callback": debugging,
    "debug_print": printing,
    "check": checking,
    "ffi_call": lambda x: jax.ffi.ffi_call("library", RECORDS)(x),
}


@pytest.mark.parametrize("operation", RAW)
def test_code_outside_of_jax_is_refused(operation):
    with pytest.raises(
        ValueError, match=rf"target must not call code outside of JAX by {operation}"
    ):
        trace(RAW[operation])
    trace(from_host(np.sin))


def test_a_run_time_check_names_how_to_leave_it_out():
    with pytest.raises(ValueError, match="In lineax, optimistix and diffrax, pass throw=False"):
        trace(calling_back)


def test_a_cache_around_a_function_is_left_out():
    """Its arguments would be keys, and arrays are none. A cache inside is named."""
    plain = lambda x: jnp.sin(x) * 2  # noqa: E731
    cached = functools.cache(functools.lru_cache(plain))

    def fingerprint(function):
        try:
            return trace(function).fingerprint
        except TypeError:
            return None

    assert fingerprint(cached) == fingerprint(plain)
    with pytest.raises(TypeError, match=r"caches results by its arguments, .*functools\.lru_cache"):
        trace(lambda x: cached(x) + 1)


def custom_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda x, t: (x[0], t[0]))
    return wrapped


def custom_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (x, None), lambda _, t: (t,))
    return wrapped


def spread(function):
    mesh = jax.make_mesh((1,), ("one",))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


PLACES = {
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(lambda _: f(x))(jnp.arange(2)),
    "map": lambda f: lambda x: lax.map(lambda _: f(x), jnp.arange(2)),
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, y: f(y), x),
    "condition": lambda f: lambda x: lax.while_loop(lambda y: jnp.all(f(y) > 0), jnp.sin, x),
    "cond": lambda f: lambda x: lax.cond(x[0] > 0, lambda y: y, f, x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_vmap": jax.custom_batching.sequential_vmap,
    "checkpoint": jax.checkpoint,
    "shard_map": spread,
    "linear solve": lambda f: lambda x: lax.custom_linear_solve(f, x, lambda _, y: y),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_outside_of_jax_is_refused_wherever_it_is(place):
    with pytest.raises(ValueError, match="must not call code outside of JAX by pure_callback"):
        trace(PLACES[place](calling_back))
    trace(PLACES[place](jnp.cos))


def test_what_is_remembered_between_calls_is_refused():
    kept = jax.new_ref(jnp.zeros(4))

    def counting(x):
        kept[...] = kept[...] + 1
        return x + kept[...]

    def scratch(x):
        inside = jax.new_ref(x)
        inside[...] = inside[...] + 1
        return inside[...]

    with pytest.raises(ValueError, match="target must be a pure function, but has side effects"):
        trace(counting)
    trace(scratch)


def test_functions_that_are_not_run_do_not_matter():
    # They are functions with an address of their own, and are not run.
    saved = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.everything_saveable)
    for function in (jax.nn.relu, jax.nn.softplus, jax.nn.logsumexp, jax.nn.sigmoid, saved):
        assert fingerprint(lambda x, f=function: f(x)) == fingerprint(lambda x, f=function: f(x))


def test_a_program_computes_what_the_function_does():
    def function(x, y):
        return {"a": jnp.sort(x) * y["b"], "c": (jnp.sum(y["b"]),)}

    x, y = jnp.array([3.0, 1.0, 2.0, 0.0]), {"b": jnp.arange(4.0)}
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, y))
    jax.tree.map(np.testing.assert_array_equal, trace(function, *specs)(x, y), function(x, y))


def test_matrix_products_run_at_the_highest_precision():
    assert "HIGHEST" in str(trace(lambda x: x @ x).jaxpr)


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (lambda x: x, True),
        (lambda x: (jnp.ones(2), jnp.sum(x)), True),
        (lambda x: jnp.ones(2), False),
        (lambda x: jnp.zeros(2) if jnp.sum(x) is x else jnp.ones(2), False),
        (lambda x: lax.fori_loop(0, 2, lambda i, c: c * x[0], 1.0), True),
    ],
)
def test_whether_a_program_uses_its_input(function, uses):
    assert trace(function).uses_input == uses


def test_a_kept_function_may_close_over_a_traced_value():
    x = jax.ShapeDtypeStruct((3,), jnp.float32)

    def scaled(factor):
        kept = Unchanging("target", lambda x: x * factor)
        program = Program.trace("target", kept, x)
        assert not program.is_concrete
        return program(jnp.arange(3.0))

    assert jax.jit(scaled)(2.0).tolist() == [0.0, 2.0, 4.0]


def test_digests_tell_nested_values_apart():
    values = [
        "a", ("a",), ("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",)), None, "None", 1, "1", 1.0,
        True, {"a": 1}, {"a": 2}, {"b": 1}, frozenset("ab"), np.float32(1), np.float64(1),
        np.ones(2), np.ones((2, 1)), np.ones(2, np.float32), [1, 2], [12],
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    # The same words of a key, for two implementations.
    keys = [jax.random.key(0, impl=name) for name in ("rbg", "unsafe_rbg")]
    np.testing.assert_array_equal(*map(jax.random.key_data, keys))
    assert digest(keys[0]) != digest(keys[1])
    assert digest(jnp.ones(2)) == digest(np.ones(2, np.float32))
    assert len(digest("a")) == 32


def test_digests_are_what_files_hold():
    nested = (1, "a", (2.0, None), {"x": True, "b": [1]}, np.arange(3, dtype=np.int8), {1, 2})
    assert digest(*nested) == "9f3f4027ec199b1b6bacacda4dc9d17a"


def test_an_array_inside_of_a_kept_program_counts_anew():
    weights = np.ones(2)
    inner = jex.ClosedJaxpr(jax.make_jaxpr(lambda x: x * weights)(weights).jaxpr, [weights])
    outer = jax.make_jaxpr(jax.jit(jnp.sin))(weights).jaxpr
    (call,) = outer.eqns
    changed = call.replace(params={**call.params, "jaxpr": inner})
    program = outer.replace(eqns=[changed])
    before = digest(program)
    assert digest(program) == before
    weights[0] = 2.0
    assert digest(program) != before


def test_a_mesh_that_is_set_does_not_matter():
    def target(x):
        return jax.jit(jnp.sort)(x) + jax.random.normal(jax.random.key(0), x.shape)

    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[0]), ())):
        inside = fingerprint(target)
    assert inside == fingerprint(target)
