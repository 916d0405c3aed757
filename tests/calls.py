"""How many calls a reader has to follow: `python tests/calls.py` counts those of several runs.

A call is one of a Python function of dpjax; comprehensions and generator expressions are part of
the function that they stand in. A warm run has compiled its programs before. A step of DP-SGD is
counted while JAX traces it, since a compiled step calls no Python. The calls of a further chunk
are the difference of two samplings.
"""

import collections
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import learning

PACKAGE = str(Path(dpjax.__file__).parent)
_PARTS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
KEY = dpjax.random.seeded_key(0)


def calls_of(run):
    """How often a run calls each function of dpjax, by file and name."""
    found = collections.Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in _PARTS:
            found[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def _release(target, mechanism):
    """A warm release of 1,000 records, as a function without arguments."""
    private = dpjax.privatize(target, mechanism)
    records = jnp.arange(1000) % 7 / 7
    private(KEY, records)
    return lambda: private(KEY, records)


def mean():
    """A warm release of a mean with Laplace noise."""
    return _release(jnp.mean, dpjax.laplace(1 / 1000, epsilon=1.0))


def histogram():
    """A warm release of a histogram."""
    query = dpjax.queries.histogram_query([0.0, 0.25, 0.5, 0.75, 1.0])
    return _release(query, dpjax.laplace(query.sensitivity("l1", n=1000), epsilon=1.0))


def dp_sgd_step():
    """The trace of a step of DP-SGD for a new network of two layers."""
    weights = {"first": jnp.zeros((5, 4)), "last": jnp.zeros((4, 1))}
    examples = jnp.zeros((100, 5)), jnp.zeros(100)
    sampling = learning.poisson_sampling(100, batch_size=10)
    noise = learning.gaussian_noise(KEY, noise_multiplier=1.0, batch_size=10)
    optimizer = optax.chain(noise, optax.sgd(0.1))
    state = optimizer.init(weights)

    def run():
        def loss(weights, example):
            features, label = example
            hidden = jnp.tanh(features @ weights["first"])
            return optax.sigmoid_binary_cross_entropy((hidden @ weights["last"])[0], label)

        clipped = learning.clipped_gradients(loss, clip_norm=1.0)

        def step(key, weights, state):
            batch = sampling(key)
            records = jax.tree.map(lambda column: column[batch.indices], examples)
            sums = clipped(weights, records, batch)
            updates, state = optimizer.update(sums, state, weights)
            return optax.apply_updates(weights, updates), state

        jax.make_jaxpr(step)(KEY, weights, state)

    run()
    return run


def warm_dp_sgd_step():
    """A warm step of DP-SGD outside of `jit`: a batch, its clipped sum, and noise."""
    weights, examples = jnp.zeros(3), jnp.ones((100, 3))
    sampling = learning.poisson_sampling(100, batch_size=10)
    clipped = learning.clipped_gradients(jnp.dot, clip_norm=1.0)
    noise = learning.gaussian_noise(KEY, noise_multiplier=1.0, batch_size=10)
    state = noise.init(weights)

    def run():
        batch = sampling(KEY)
        noise.update(clipped(weights, examples[batch.indices], batch), state)

    run()
    return run


def further_steps_of_fit():
    """What 10 further steps of `fit` add."""

    def run(epochs):
        return lambda: learning.fit(
            KEY,
            jnp.dot,
            jnp.zeros(3),
            database=jnp.ones((100, 3)),
            optimizer=optax.sgd(0.1),
            epochs=epochs,
            batch_size=10,
            clip_norm=1.0,
            noise_multiplier=10.0,
            delta=1e-5,
        )

    run(1)()
    run(2)()
    return calls_of(run(2)) - calls_of(run(1))


def sampling(chunks=1):
    """A warm sampling of the sensitivity of a mean."""

    def oracle(key, n):
        return jax.random.uniform(key, (n,))

    def run():
        key = jax.random.key(0)
        return dpjax.sample_sensitivity(
            key, jnp.mean, oracle, n=20, norm="l1", m=1000 * chunks, gamma=0.01, chunk_size=1000
        )

    run()
    return run


def further_chunks(count=10):
    """What so many further chunks of a sampling add."""
    few, many = calls_of(sampling(10)), calls_of(sampling(10 + count))
    return many - few


def counted():
    """The calls of every run, by its name."""
    return {
        "warm mean, 1,000 records": calls_of(mean()),
        "warm histogram, 1,000 records": calls_of(histogram()),
        "trace of a step of DP-SGD": calls_of(dp_sgd_step()),
        "warm step of DP-SGD": calls_of(warm_dp_sgd_step()),
        "10 further steps of fit": further_steps_of_fit(),
        "warm sampling in one chunk": calls_of(sampling()),
        "10 further chunks of a sampling": further_chunks(),
    }


def sizes(calls):
    """The numbers of calls, of functions and of files."""
    return calls.total(), len(calls), len({file for file, _ in calls})


if __name__ == "__main__":
    for name, calls in counted().items():
        print("{}: {:,} calls of {} functions in {} files".format(name, *sizes(calls)))
        if "--all" in sys.argv:
            for (file, function), times in calls.most_common():
                print(f"  {times:6,}  {file}  {function}")
