"""Calls as users write them, for pyright in `make lint`: it must find what is wrong, and only that.

Each wrong word is ignored by name, and an ignored error that is none is an error.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
import jax
import jax.numpy as jnp

import dpjax

KEY = dpjax.random.secure_key()


def oracle(key: jax.Array, n: int) -> jax.Array:
    return jax.random.uniform(key, (n,))


def largest(difference: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(difference))


def mechanisms(sensitivity: dpjax.Sensitivity) -> list[dpjax.Mechanism]:
    """Each kind of mechanism keeps the contract, with all that other parts use of it."""
    workload = dpjax.queries.linear_workload([[1, 1, 0], [0, 1, 1]])
    return [
        dpjax.laplace(1.0, 1.0),
        dpjax.gaussian(1.0, 1.0, 1e-5),
        dpjax.shaped_gaussian(sensitivity, 1.0, 1e-5),
        dpjax.bernstein(1.0, 1.0, degree=2, dims=2),
        dpjax.exponential(1.0, 1.0),
        dpjax.queries.select_each(1.0, 1.0, count=2),
        dpjax.queries.top_k(1.0, 1.0, k=2),
        dpjax.above_threshold(1.0, 1.0, threshold=0.0),
        dpjax.randomized_response(1.0),
        dpjax.unary_encoding(1.0, 3),
        dpjax.smooth_quantile(1.0, 1e-6, lower=0.0, upper=1.0),
        dpjax.propose_test_release(1.0, 1e-6, bound=0.1, lower=0.0, upper=1.0),
        dpjax.queries.mwem(workload, 1.0, rounds=2, records=10),
        dpjax.queries.name_search(1.0, width=2, threshold=1),
        dpjax.learning.private_weighted_majority(1.0, 1e-6, steps=3),
    ]


def right() -> dpjax.Release:
    dpjax.sample_sensitivity(KEY, jnp.mean, oracle, n=3, norm=largest, positions="each")
    sensitivity = dpjax.sample_sensitivity(KEY, jnp.mean, oracle, n=3, norm="l2", gamma=0.1)
    normal = dpjax.oracles.independent(jax.random.normal, jax.scipy.stats.norm.logpdf)
    mixed = dpjax.oracles.mixture([normal, jax.random.uniform], [1, 2])
    mixed.log_prob(normal.record(KEY))
    dpjax.sample_sensitivity(KEY, jnp.mean, mixed, n=3, norm="l1")
    mechanism = dpjax.gaussian(sensitivity, 1.0, 1e-5, noise="float", calibration="classical")
    return dpjax.privatize(jnp.mean, mechanism)(KEY, jnp.ones(3))


def of_a_table(ledger: dpjax.Ledger) -> list[dpjax.Release]:
    ends, cuts = {"price": (0, 20_000), "carat": (0.2, 5.0)}, {"cut": ["Fair", "Ideal"]}
    table = dpjax.PrivateTable({"price": jnp.ones(3)}, ledger=ledger, most_rows=10, missing="lower")
    return [
        table.count(by=cuts, where=lambda row: row["price"] > 1000, error=20),
        table.crosstab(["cut"], keys=cuts, share=0.1),
        table.mean("price", bounds=(0, 20_000), by={"cut": table.keys("cut", epsilon=0.1)}),
        table.variance("price", bounds=None, epsilon=0.1),
        table.quantiles("price", [0.25, 0.5], bounds=ends, epsilon=0.1),
        table.regression("price", ["carat"], bounds=ends, epsilon=0.1, key=KEY),
    ]


def wrong() -> None:
    table = dpjax.PrivateTable({}, most_rows=10, missing="keep")  # pyright: ignore[reportArgumentType]
    table.mean("price", epsilon=0.1)  # pyright: ignore[reportCallIssue]
    dpjax.operating_point(m=10, method="dwk")  # pyright: ignore[reportArgumentType]
    dpjax.assume_sensitivity(1.0, norm="L1")  # pyright: ignore[reportArgumentType]
    dpjax.laplace(1.0, 1.0, noise="flt")  # pyright: ignore[reportArgumentType]
    for sample in (dpjax.sample_sensitivity, dpjax.sample_distances):
        sample(
            KEY,
            jnp.mean,
            oracle,
            n=3,
            m=10,
            norm="L1",  # pyright: ignore[reportArgumentType]
            positions="lst",  # pyright: ignore[reportArgumentType]
        )
