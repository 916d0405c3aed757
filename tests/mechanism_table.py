"""One row for every mechanism, shared by the tests that all of them must pass.

A row is a factory and the arguments of `check_conformance`. A new mechanism is one row.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax._core._pytree import TreeSpec
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE
from dpjax.sensitivity._shaped_norm import shape_of


def own(sensitivity, epsilon):
    """Laplace noise for three coordinates that may all move by the sensitivity."""
    return additive(
        sensitivity, epsilon, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e, dims=3
    )


def shaped(sensitivity, epsilon):
    """Gaussian noise of a shape; a number is a bound in its norm."""
    if not isinstance(sensitivity, dpjax.Sensitivity):
        sensitivity = dpjax.assume_sensitivity(sensitivity, norm=SHAPE)
    return dpjax.shaped_gaussian(sensitivity, epsilon, 1e-2)


MATRIX = np.array([[1.0, 0.3], [0.3, 0.5]])
SHAPE = shape_of(MATRIX, TreeSpec.of(jnp.zeros(2)), 2.0**-20, None)
SCALAR = {"value": jnp.asarray(0.0), "neighbor": jnp.asarray(1.0)}
VECTOR = {"value": jnp.zeros(3), "neighbor": jnp.asarray([0.6, 0.0, -0.4])}
L2_VECTOR = {"value": jnp.zeros(3), "neighbor": jnp.asarray([0.6, 0.0, -0.8])}
TREE = {
    "value": {"a": jnp.zeros(2), "b": jnp.asarray(0.0)},
    "neighbor": {"a": jnp.asarray([0.25, 0.25]), "b": jnp.asarray(0.5)},
}
COUNTS = {"value": jnp.asarray([3, 0]), "neighbor": jnp.asarray([4, 0])}
SCORES = {"value": jnp.asarray([2.0, 1.0, 0.0]), "neighbor": jnp.asarray([1.0, 2.0, 1.0])}
# All rise by 4, and two of them by 1 more.
RANGES = {"value": jnp.asarray([2.0, 1.0, 0.0]), "neighbor": jnp.asarray([6.0, 6.0, 5.0])}
INTEGER_SCORES = {"value": jnp.asarray([2, 1, 0]), "neighbor": jnp.asarray([1, 2, 1])}
LATTICE = {"value": jnp.zeros((3, 3)), "neighbor": jnp.ones((3, 3))}
# At distance 1, but for a margin that covers the grid before the map.
SHAPED = {"value": jnp.zeros(2), "neighbor": jnp.asarray(0.9999 * SHAPE.matrix @ [0.6, -0.8])}
ANSWERS = {"value": jnp.asarray([2]), "neighbor": jnp.asarray([0])}
LOSSES = {
    "value": jnp.asarray([[1.0, 0.0], [0.5, 1.0], [0.0, 0.0]]),
    "neighbor": jnp.asarray([[0.0, 1.0], [0.5, 1.0], [0.0, 0.0]]),
}
WORKLOAD = dpjax.queries.linear_workload([[1, 1, 0], [0, 1, 1], [1, 0, 0]])
ANSWERED = {"value": jnp.asarray([5, 7, 3]), "neighbor": jnp.asarray([5, 6, 4])}
ROWS_OF_SCORES = {
    "value": jnp.asarray([[2, 1, 0], [0, 0, 1]]),
    "neighbor": jnp.asarray([[1, 2, 1], [1, 0, 0]]),
}
# Heavy programs, for which fewer draws tell enough.
FEW = {"draws": 2**14}
NAMES = {
    "value": jnp.asarray([[1, 0], [1, 2], [2, 0]], "uint8"),
    "neighbor": jnp.asarray([[1, 0], [2, 1], [2, 0]], "uint8"),
}
KEY = jax.random.key(0)
UNIFORM = dpjax.oracles.independent(jax.random.uniform)
RECORDS = {
    "value": jnp.linspace(0.3, 0.7, 25),
    "neighbor": jnp.linspace(0.3, 0.7, 25).at[3].set(1.0),
    "sensitivity": None,
}

TABLE = {
    "laplace": (dpjax.laplace, SCALAR),
    "laplace, vector": (dpjax.laplace, VECTOR),
    "laplace, pytree": (dpjax.laplace, TREE),
    "laplace, integers": (dpjax.laplace, COUNTS),
    "laplace, epsilon 5": (dpjax.laplace, SCALAR | {"epsilon": 5.0, "sensitivity": 2.0}),
    "discrete laplace": (dpjax.discrete_laplace, COUNTS),
    "discrete laplace, epsilon 5": (
        dpjax.discrete_laplace,
        COUNTS | {"epsilon": 5.0, "sensitivity": 2.0, "neighbor": jnp.asarray([4, 1])},
    ),
    "gaussian": (lambda s, e: dpjax.gaussian(s, e, 1e-2), SCALAR),
    "gaussian, vector": (lambda s, e: dpjax.gaussian(s, e, 1e-5), L2_VECTOR),
    "gaussian, integers": (lambda s, e: dpjax.gaussian(s, e, 1e-2), COUNTS),
    "gaussian, classical": (
        lambda s, e: dpjax.gaussian(s, e, 1e-3, calibration="classical"),
        SCALAR,
    ),
    "shaped gaussian": (shaped, SHAPED),
    "exponential": (dpjax.exponential, SCORES),
    "exponential, weights and range": (
        lambda s, e: dpjax.exponential(
            s if isinstance(s, dpjax.Sensitivity) else dpjax.assume_sensitivity(s, norm="range"),
            e,
            log_base=[0.0, -1.0, 0.5],
        ),
        RANGES,
    ),
    "permute-and-flip, weights": (
        lambda s, e: dpjax.permute_and_flip(s, e, log_base=[0.0, -1.0, 0.5]),
        SCORES,
    ),
    "posterior sampler": (
        lambda s, e: dpjax.posterior_sampler(s, e, log_prior=[-0.5, 0.0, 1.0]),
        RANGES,
    ),
    "permute-and-flip": (dpjax.permute_and_flip, SCORES),
    "bernstein": (lambda s, e: dpjax.bernstein(s, e, degree=2, dims=2), LATTICE),
    "bernstein, order 3": (lambda s, e: dpjax.bernstein(s, e, degree=2, dims=2, order=3), LATTICE),
    "randomized response": (
        lambda e: dpjax.randomized_response(e, categories=3),
        ANSWERS | {"sensitivity": None},
    ),
    "weighted majority": (
        lambda e: dpjax.learning.private_weighted_majority(e, 1e-2, steps=3),
        LOSSES | {"sensitivity": None},
    ),
    "weighted majority, advanced composition": (
        lambda e: dpjax.learning.private_weighted_majority(e, 1e-2, steps=3, method="drv"),
        LOSSES | {"sensitivity": None},
    ),
    "mwem": (
        lambda e: dpjax.queries.mwem(WORKLOAD, e, rounds=2, records=10),
        ANSWERED | FEW | {"sensitivity": None},
    ),
    "unary encoding": (
        lambda e: dpjax.unary_encoding(e, categories=3),
        ANSWERS | {"sensitivity": None},
    ),
    "unary encoding, symmetric": (
        lambda e: dpjax.unary_encoding(e, categories=3, flips="symmetric"),
        ANSWERS | {"sensitivity": None},
    ),
    "top-k": (lambda s, e: dpjax.queries.top_k(s, e, k=2), SCORES),
    "top-k, integers": (lambda s, e: dpjax.queries.top_k(s, e, k=2), INTEGER_SCORES),
    "selection in each row": (
        lambda s, e: dpjax.queries.select_each(s, e, count=2),
        ROWS_OF_SCORES,
    ),
    "name search": (
        lambda e: dpjax.queries.name_search(e, width=2, threshold=1, capacity=2),
        NAMES | FEW | {"sensitivity": None},
    ),
    "above threshold": (
        lambda s, e: dpjax.above_threshold(s, e, threshold=0.5, positives=2),
        SCORES | FEW,
    ),
    "smooth quantile": (
        lambda e: dpjax.smooth_quantile(e, 1e-2, lower=0.0, upper=1.0),
        RECORDS,
    ),
    "propose-test-release": (
        lambda e: dpjax.propose_test_release(e, 1e-2, bound=0.05, lower=0.0, upper=1.0),
        RECORDS,
    ),
    "oracle check": (
        lambda e: dpjax.check_oracle(KEY, UNIFORM, jnp.sin, n=25, epsilon=e, simulations=19),
        RECORDS | FEW,
    ),
    "subset envelope": (
        lambda e: dpjax.subset_envelope(
            jnp.mean, e, lower=0.0, upper=1.0, blocks=6, size=2, groups=2, candidates=16
        ),
        RECORDS | FEW,
    ),
    "one's own": (own, {"value": jnp.zeros(3), "neighbor": jnp.asarray([1.0, -1.0, 1.0])}),
}

# A row compiles four programs, in 5 to 7 seconds of one core. Each kind of noise has a fast row.
FAST = {
    "laplace",
    "discrete laplace",
    "gaussian",
    "exponential",
    "bernstein",
    "randomized response",
    "unary encoding",
    "above threshold",
    "smooth quantile",
}
