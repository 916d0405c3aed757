"""Names of requests: the same for the same, others for anything else, by every mechanism."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core._pytree import TreeSpec
from dpjax._tracing._programs import Program
from dpjax.release._transaction import request_of


def by_columns(difference):
    return jnp.max(jnp.sum(jnp.abs(difference), axis=0))


def own(epsilon):
    noise = dpjax.random.LAPLACE
    return dpjax.mechanisms.additive(1.0, epsilon, norm=by_columns, noise=noise)


MAKE = {
    "laplace": lambda epsilon: dpjax.laplace(1.0, epsilon),
    "gaussian": lambda epsilon: dpjax.gaussian(1.0, epsilon, 1e-6),
    "exponential": lambda epsilon: dpjax.exponential(1.0, epsilon),
    "permute and flip": lambda epsilon: dpjax.permute_and_flip(1.0, epsilon),
    "bernstein": lambda epsilon: dpjax.bernstein(1.0, epsilon, degree=2, dims=1),
    "one's own": own,
}
RECORDS = np.linspace(0, 1, 3, dtype="float32")


def name(mechanism, key, target=jnp.sort, records=RECORDS, given="ages"):
    spec = TreeSpec.of(jnp.asarray(records))
    program = Program.trace("target", target, spec.tree())
    asked = program.fingerprint, spec, mechanism
    return request_of(given, mechanism, key, program.outputs, *asked).fingerprint


def test_a_request_is_named_by_what_is_asked_for(key, keys):
    names = set()
    for make in MAKE.values():
        first = name(make(0.5), key)
        # Another object, another key, other records.
        assert name(make(0.5), keys(1), records=RECORDS + 1) == first
        names |= {first, name(make(np.nextafter(0.5, 1)), key)}
    assert len(names) == 2 * len(MAKE)


def test_the_name_counts(key):
    """Also one that looks like the end of another, or like one of NumPy's."""
    names = ["ages", "ages ", "age", "AGES", "ages/2027", "'ages'"]
    assert len({name(MAKE["laplace"](0.5), key, given=one) for one in names}) == len(names)
    found = name(MAKE["laplace"](0.5), key, given=np.str_("ages"))
    assert found == name(MAKE["laplace"](0.5), key)


def test_without_a_name_there_is_no_request(key):
    value = TreeSpec.of(jnp.zeros(3))
    assert request_of(None, MAKE["laplace"](0.5), key, value) is None
    with pytest.raises(TypeError, match="integer categories"):
        request_of(None, dpjax.randomized_response(0.5), key, value)


def test_answers_of_people_have_a_name_too(key):
    records = np.array([0, 1, 1])
    found = [
        name(dpjax.randomized_response(0.5, categories), key, records=records)
        for categories in (2, 2, 3)
    ]
    assert found[0] == found[1] != found[2]


def test_where_a_sensitivity_comes_from_counts(key):
    bound = dpjax.assume_sensitivity(1.0, norm="l1")
    others = [
        dataclasses.replace(bound, **{field: value})
        for field, value in {
            "gamma": 0.1,
            "confidence": 0.9,
            "identity": "a",
            "positions": "average",
            "n": 3,
            "m": 7,
        }.items()
    ]
    assert len({name(dpjax.laplace(one, 0.5), key) for one in (bound, *others)}) == 7


def test_the_kind_of_key_counts(key):
    assert name(MAKE["laplace"](0.5), key) != name(MAKE["laplace"](0.5), dpjax.random.secure_key())


def test_a_program_on_the_host_counts_by_its_code(key):
    pytest.importorskip("cloudpickle")

    def made(factor):
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        return dpjax.targets.host(lambda x: np.float32(factor) * np.sort(x), output=shape)

    one, again, other = (name(MAKE["laplace"](0.5), key, made(factor)) for factor in (1, 1, 2))
    assert one == again != other


def test_another_program_inside_of_a_mechanism_is_another_request(keys, tmp_path):
    """What a mechanism of the user's program computes may change between two releases."""
    weight = [1.0]
    envelope = dpjax.subset_envelope(
        lambda x: weight[0] * jnp.mean(x), 2.0, lower=0, upper=1, candidates=8, blocks=10, size=1,
        groups=1,
    )  # fmt: skip
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=100)
    private = dpjax.privatize(lambda x: x, envelope, ledger=ledger)
    records = jnp.full(100, 0.5)
    private(keys(0), records, name="half")
    weight[0] = 0.1
    private(keys(1), records, name="half")
    private(keys(2), records, name="half")  # The same as before: free of charge.
    assert len(ledger.history()) == 2
