"""Posteriors of ten pairs of target and mechanism are calibrated; wrong ones are refuted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._core._open_ledgers import untold_programs
from dpjax.auditing import calibration

# The standard error of a coverage of 95% is .24% after so many trials.
TRIALS = 8000
# A right posterior is refuted once in 1e4 pairs, by its coverage once in 2e4.
FALSE_ALARM, WITHIN = 1e-4, 0.01
# A wrong one must be refuted so clearly that the power at FALSE_ALARM is nearly 1.
SURELY = 1e-8
PEOPLE, DRAWS = 10, 40_000


def low(key):
    """A prior that is wrong: low shares are much more likely than under a uniform one."""
    return jax.random.uniform(key) ** 3


def bernoulli(key, share, n):
    return jax.random.bernoulli(key, share, (n,)).astype(jnp.int32)


def categories(key, share, n):
    """Three categories, the first of which has a share."""
    of_first, of_others = jax.random.split(key)
    others = 1 + jax.random.bernoulli(of_others, 0.3, (n,)).astype(jnp.int32)
    return jnp.sort(jnp.where(bernoulli(of_first, share, n) == 1, 0, others))


def places(key, share, n):
    """Numbers 0, 1/2 or 1."""
    return (categories(key, share, n) / 2)[:, None]


def line(key, share, n):
    """Points of a square; theta is the share of points on the rising diagonal."""
    of_x, of_y = jax.random.split(key)
    x = 2.0 * bernoulli(of_x, 0.5, n).astype(float) - 1
    y = jnp.where(bernoulli(of_y, share, n) == 1, x, -x)
    return {"x": x[:, None], "y": y}


def ones(x):
    return jnp.sum(x, dtype=jnp.int32)


def histogram_of_three(x):
    return jnp.stack([ones(x == i) for i in range(3)])


def density(records):
    """A kernel density, as a function on the unit interval."""
    return lambda x: jnp.mean(jnp.exp(-0.5 * ((x[0] - records[:, 0]) / 0.2) ** 2))


def logarithm_or_failure(records):
    """Code on the host that fails where fewer than three people answer yes."""
    return np.float32(np.log(int(np.sum(records)) - 2))


def host():
    return dpjax.targets.host(
        logarithm_or_failure,
        output=jax.ShapeDtypeStruct((), jnp.float32),
        failure=jnp.float32(-1.0),
        jobs=1,
    )


def privatized(target, mechanism):
    return lambda factor: dpjax.privatize(target, mechanism(factor))


HISTOGRAM = queries.histogram_query(2)
# A private function given a factor of its epsilon, and a model. The noise is about as large as the
# sampling error, so that a wrong density matters.
PAIRS = {
    "Laplace mean": (
        privatized(
            lambda x: jnp.mean(x.astype(float)), lambda f: dpjax.laplace(1 / PEOPLE, 0.5 * f)
        ),
        bernoulli,
    ),
    "Gaussian histogram": (
        privatized(HISTOGRAM, lambda f: dpjax.gaussian(HISTOGRAM.sensitivity("l2"), 2 * f, 1e-5)),
        bernoulli,
    ),
    "exponential mode": (
        privatized(
            lambda x: jnp.stack([ones(x), PEOPLE - ones(x)]),
            lambda f: dpjax.exponential(1.0, 0.4 * f),
        ),
        bernoulli,
    ),
    "Bernstein density": (
        privatized(
            dpjax.evaluate_on_lattice(density, degree=3, dims=1),
            lambda f: dpjax.bernstein(1 / PEOPLE, 2 * f, degree=3, dims=1),
        ),
        places,
    ),
    "linear regression": (
        lambda f: functools.partial(
            queries.private_linear_regression, x_radius=1.0, y_radius=1.0, epsilon=2 * f
        ),
        line,
    ),
    "randomized response": (privatized(lambda x: x[:6], dpjax.randomized_response), bernoulli),
    "sparse vector": (
        privatized(histogram_of_three, lambda f: dpjax.above_threshold(1.0, f, threshold=4.0)),
        categories,
    ),
    "top k": (
        privatized(histogram_of_three, lambda f: queries.top_k(1.0, f, k=2)),
        categories,
    ),
    "black box": (lambda f: dpjax.privatize(host(), dpjax.laplace(1.0, 2 * f)), bernoulli),
}


def bank_of(key, private, model, prior=jax.random.uniform, draws=DRAWS):
    return dpjax.simulation_bank(key, private, prior=prior, model=model, n=PEOPLE, draws=draws)


@dataclasses.dataclass
class ByValue:
    """Draws from a weighted bank, where each distinct value is weighed once.

    The law of the draws is that of `SimulationBank.sample`, for a hundredth of the time.
    """

    theta: jax.Array  # Sorted by value.
    values: object  # The distinct values.
    counts: jax.Array

    @classmethod
    def of(cls, theta, values):
        theta = np.asarray(theta)
        rows = [np.asarray(x).reshape(len(theta), -1) for x in jax.tree.leaves(values)]
        _, first, inverse, counts = np.unique(
            np.concatenate(rows, axis=1),
            axis=0,
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        order = np.argsort(inverse.ravel(), kind="stable")
        distinct = jax.tree.map(lambda x: jnp.asarray(x)[first], values)
        return cls(jnp.asarray(theta[order]), distinct, jnp.asarray(counts))

    def logs(self, log_prob):
        """The log weights of the distinct values, up to a constant."""
        return jax.vmap(log_prob)(self.values) + jnp.log(self.counts.astype(float))

    def sample(self, key, log_prob, draws):
        of_value, of_theta = jax.random.split(key)
        value = jax.random.categorical(of_value, self.logs(log_prob), shape=(draws,))
        counts = self.counts[value]
        before = (jnp.cumsum(self.counts) - self.counts)[value]
        place = jnp.floor(jax.random.uniform(of_theta, (draws,)) * counts.astype(float))
        return self.theta[before + jnp.minimum(place.astype(counts.dtype), counts - 1)]


def check(key, posteriors, release):
    """Ranks of one theta among the draws of a right posterior, and of two wrong ones."""

    def prior(key):
        return dict.fromkeys(posteriors, jax.random.uniform(key))

    def posterior(key, released, draws):
        return {name: draw(key, released, draws) for name, draw in posteriors.items()}

    found = calibration(
        key,
        posterior,
        prior=prior,
        release=lambda key, theta: release(key, theta["right"]),
        repeats=TRIALS,
    )
    each = {
        name: dataclasses.replace(found, ranks=column[:, None])
        for name, column in zip(sorted(posteriors), found.ranks.T, strict=True)
    }
    print(each)
    assert each["right"].p_value > FALSE_ALARM
    assert each["right"].coverage() == pytest.approx(0.95, abs=WITHIN)
    assert each["wrong density"].p_value < SURELY
    assert each["wrong prior"].p_value < SURELY


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_posteriors_are_calibrated_and_wrong_ones_refuted(name, keys):
    """The wrong density has twice the epsilon, so half the noise where the noise is additive."""
    make, model = PAIRS[name]
    right = bank_of(keys(1), make(1.0), model)
    other_density = bank_of(keys(1), make(2.0), model, draws=200)._world
    other_prior = bank_of(keys(3), make(1.0), model, prior=low)

    def drawn(bank, world):
        by_value = ByValue.of(bank.theta, bank.values)

        def draw(key, released, draws):
            return by_value.sample(key, functools.partial(world.log_prob, (released,)), draws)

        return draw

    posteriors = {
        "right": drawn(right, right._world),
        "wrong density": drawn(right, other_density),
        "wrong prior": drawn(other_prior, right._world),
    }
    check(keys(2), posteriors, right.draw_release)


def test_distinct_values_have_the_weights_of_the_bank(keys):
    """The short cut above, against `SimulationBank.posterior`."""
    make, model = PAIRS["Laplace mean"]
    bank = bank_of(keys(1), make(1.0), model, draws=1000)
    released = jnp.float32(0.4)
    by_value = ByValue.of(bank.theta, bank.values)
    log_prob = functools.partial(bank._world.log_prob, (released,))
    weights = jax.nn.softmax(by_value.logs(log_prob))
    given = bank.posterior(released).weights
    wanted = [given[np.asarray(bank.values[0] == x)].sum() for x in by_value.values[0]]
    np.testing.assert_allclose(weights, wanted, rtol=1e-4)
    drawn = by_value.sample(jax.random.key(0), log_prob, 20_000)
    assert float(jnp.mean(drawn)) == pytest.approx(bank.posterior(released).mean, abs=0.01)
    np.testing.assert_array_equal(np.sort(by_value.theta), np.sort(bank.theta))


# Labels times features: the noise of a training is a function of the counts of these four.
SIGNED = np.array([-1.0, -0.5, 0.5, 1.0], np.float32)
STRENGTH = 0.1


def signed_features(key, theta, n):
    """Labels of a logistic model with the slope 6 theta - 3."""
    of_x, of_sign, of_y = jax.random.split(key, 3)
    x = jnp.where(jax.random.bernoulli(of_x, 0.5, (n,)), 1.0, 0.5)
    x = x * jax.random.rademacher(of_sign, (n,), x.dtype)
    positive = jax.random.uniform(of_y, (n,)) < jax.nn.sigmoid((6 * theta - 3) * x)
    return {"x": x[:, None], "y": jnp.where(positive, 1.0, -1.0)}


def log_density_of_weight(plan, scale, weight, counts):
    """The noise b is a function of the weight, and so is its slope.

    A release adds noise to the weight, over which a Gauss-Hermite rule integrates.
    """
    nodes, shares = np.polynomial.hermite_e.hermegauss(7)
    at = weight - plan.output_scale * jnp.asarray(nodes, jnp.float32)
    off = jax.nn.sigmoid(-at[:, None] * SIGNED[None])
    people = counts.astype(at.dtype)[None]
    b = jnp.sum(people * SIGNED[None] * off, axis=1) - PEOPLE * STRENGTH * at
    slope = jnp.sum(people * (SIGNED**2)[None] * off * (1 - off), axis=1) + PEOPLE * STRENGTH
    logs = -0.5 * (b / (scale * plan.linear_scale)) ** 2 + jnp.log(slope)
    return jax.scipy.special.logsumexp(logs + jnp.log(jnp.asarray(shares, jnp.float32)))


@pytest.mark.slow
def test_posteriors_of_objective_perturbation_are_calibrated_and_wrong_ones_refuted(keys):
    """Its density in one dimension, which `dpjax.posterior` does not know."""
    training = dpjax.learning.objective_perturbation(
        regularization=STRENGTH, n=PEOPLE, dims=1, epsilon=6.0, delta=1e-5
    )

    def world(prior, key):
        of_theta, of_data = jax.random.split(key)
        theta = prior(of_theta)
        data = signed_features(of_data, theta, PEOPLE)
        signed = data["x"][:, 0] * data["y"]
        return theta, jnp.stack([ones(signed == x) for x in SIGNED])

    split = jax.random.split(jax.random.key(1), DRAWS)

    def drawn(prior, scale):
        by_value = ByValue.of(*jax.vmap(functools.partial(world, prior))(split))

        def draw(key, weights, draws):
            log_prob = functools.partial(log_density_of_weight, training.plan, scale, weights[0])
            return by_value.sample(key, log_prob, draws)

        return draw

    def release(key, theta):
        of_data, of_noise = jax.random.split(key)
        data = signed_features(dpjax.random._keys.sampling_key(of_data), theta, PEOPLE)
        with untold_programs():
            return training(of_noise, data).value

    posteriors = {
        "right": drawn(jax.random.uniform, 1.0),
        "wrong density": drawn(jax.random.uniform, 0.5),
        "wrong prior": drawn(low, 1.0),
    }
    check(keys(2), posteriors, release)
