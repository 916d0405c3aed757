"""Numbers of guarantees and of accountants, of every kind that a caller may have them in."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax import accounting

ONE = dpjax.Guarantee(1.0, 1e-6)
PARAMETERS = {
    "compose_at, delta": lambda x: accounting.compose_at(ONE, ONE, delta=x),
    "zcdp_to_epsilon, rho": lambda x: accounting.zcdp_to_epsilon(x, delta=1e-6),
    "zcdp_to_epsilon, delta": lambda x: accounting.zcdp_to_epsilon(0.125, delta=x),
    "under_distribution_shift, kl": lambda x: accounting.under_distribution_shift(ONE, kl=x, n=10),
    "PrivacyFilter, epsilon": lambda x: accounting.PrivacyFilter(epsilon=x, delta=1e-6),
    "PrivacyFilter, delta": lambda x: accounting.PrivacyFilter(epsilon=1.0, delta=x),
}
COUNTS = {
    "group, size": lambda x: accounting.group(ONE, x),
    "under_distribution_shift, n": lambda x: accounting.under_distribution_shift(ONE, kl=0.0, n=x),
}
GUARANTEES = {
    "compose": accounting.compose,
    "group": lambda x: accounting.group(x, 2),
    "parallel": lambda x: accounting.parallel(x, x),
    "compose_at": lambda x: accounting.compose_at(x, delta=1e-6),
    "under_distribution_shift": lambda x: accounting.under_distribution_shift(x, kl=0.0, n=10),
}


def shown(result):
    """To the last bit; of a filter what it has left."""
    if not isinstance(result, accounting.PrivacyFilter):
        return repr(result)
    return repr({name: x for name, x in vars(result).items() if name != "_paying"})


@pytest.mark.parametrize("name", PARAMETERS)
def test_numbers_that_are_none_are_refused(name):
    entry, parameter = PARAMETERS[name], name.split(", ")[1]
    for wrong in [*odd_inputs.NO_NUMBERS, *odd_inputs.NO_PARAMETERS]:
        with pytest.raises((TypeError, ValueError), match=rf"^(exactly one of )?{parameter}"):
            entry(wrong)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_number_of_any_kind_is_the_same(name):
    """Of a power of two all kinds hold the same one."""
    entry = PARAMETERS[name]
    right = shown(entry(2.0**-7))
    for kind in odd_inputs.KINDS_OF_NUMBERS:
        assert shown(entry(kind(2.0**-7))) == right, kind


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_whole_numbers(name):
    entry, parameter = COUNTS[name], name.split(", ")[1]
    for wrong in [*odd_inputs.NO_NUMBERS, 0, -1, 2.0, np.float32(2), np.nan]:
        with pytest.raises((TypeError, ValueError), match=rf"^{parameter} must"):
            entry(wrong)
    right = repr(entry(3))
    for kind in (np.int8, np.uint8, np.int64, np.uint64, np.asarray, jnp.asarray):
        assert repr(entry(kind(3))) == right


@pytest.mark.parametrize("name", GUARANTEES)
def test_what_is_no_guarantee_is_refused(name):
    for wrong in (1.0, None, "1", (1.0, 1e-6), dpjax.laplace):
        with pytest.raises((TypeError, ValueError), match="uarantee"):
            GUARANTEES[name](wrong)


@pytest.mark.parametrize(
    "numbers",
    [
        (-1.0, 0.0),
        (1.0, -0.5),
        (1.0, 1.5),
        (1.0, 0.0, -1.0),
        (1.0, 0.0, 1.5),
        (1.0, 0.0, 0.0, 2.0),
        (1j, 0.0),
    ],
)
def test_what_promises_less_than_nothing_is_no_guarantee(numbers):
    with pytest.raises((TypeError, ValueError), match=r"epsilon|delta|gamma|confidence"):
        accounting.compose(dpjax.Guarantee(*numbers))
