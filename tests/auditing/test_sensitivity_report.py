"""What a proof, a search and samples say of one sensitivity."""

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax.proving import Ball, Categories

NUMBERS = jax.ShapeDtypeStruct((20,), jnp.float32)
FAST = {"steps": 5, "restarts": 8}


def oracle(key, n):
    """A third of the records lies beyond the bounds, where a release clamps them."""
    return 1.5 * jax.random.uniform(key, (n,))


def test_the_three_numbers_are_in_order(key):
    found = dpjax.sensitivity_report(
        key, jnp.mean, NUMBERS, bounds=(0, 1), norm="l1", oracle=oracle, gammas=(0.2, 0.05), **FAST
    )
    few, many = found.sampled.values()
    assert found.proved.gamma == 0
    assert found.proved.value >= found.adversarial.distance > many > few > 0
    assert found.adversarial.distance == pytest.approx(1 / 20, rel=1e-3)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["l1", "proved", "adversarial", *["sampled"] * 2]
    assert lines[-1].split()[2] == "0.05"
    assert float(lines[-1].split()[3]) == pytest.approx(many / found.proved.value, rel=0.01)


def test_a_refusal_is_a_line_with_its_remedy(key):
    def spectrum(x):
        return jnp.fft.rfft(x).real

    found = dpjax.sensitivity_report(
        key, spectrum, NUMBERS, bounds=(0, 1), norm="linf", oracle=oracle, gammas=(0.2,), **FAST
    )
    assert found.proved is None
    assert found.adversarial.distance > 0.9
    *_, proved, sampled = str(found).splitlines()
    assert proved.startswith("proved: no proof for fft")
    assert "Remedy" in proved
    assert sampled.startswith("sampled at gamma 0.2: ")
    assert found.sampled == {0.2: None}  # It depends on the order of the records.


@pytest.mark.parametrize(
    ("records", "bounds", "width"),
    [
        (jax.ShapeDtypeStruct((5, 2), jnp.float32), Ball(1.0), 2.0),
        (jax.ShapeDtypeStruct((5,), jnp.int32), Categories((1, 4)), 3.0),
    ],
)
def test_the_search_keeps_the_bounds_of_the_proof(key, records, bounds, width):
    found = dpjax.sensitivity_report(
        key, lambda x: x.sum(0).astype(jnp.float32), records, bounds=bounds, norm="l2", **FAST
    )
    assert 0.6 * width < found.adversarial.distance <= found.proved.value <= 1.001 * width
    assert found.sampled == {}
