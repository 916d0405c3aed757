"""Tempered posteriors by dpjax's own moves, beside BlackJAX's Hamiltonian Monte Carlo.

The mean of eight columns of 50 normal records is released, and the exact posterior is normal. Both
move the same normal numbers, which simulate populations, under the same densities. BlackJAX gets
systematic resampling, half of the particles as the effective target, and as many steps of each
path. The size of its steps is chosen by hand, so each of several sizes is a run.
This needs the extra "frameworks".
"""

import time
from collections.abc import Callable

import blackjax
import blackjax.smc.resampling
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.smc import extend_params

import dpjax
from dpjax.population._latents import Latents
from dpjax.population._tempered import _KICKS, _MOVES
from dpjax.population._world import World

DIMS, N, SD, DRAWS = 8, 50, 0.5, 1024
NOISE = dpjax.gaussian(2 * SD / N * DIMS**0.5, 4.0, delta=1e-6)
PRIVATE = dpjax.privatize(lambda x: jnp.mean(x, axis=0), NOISE)
RELEASED = jnp.linspace(-1, 1.5, DIMS)


def prior(key: jax.Array) -> jax.Array:
    """Standard normal means."""
    return jax.random.normal(key, (DIMS,))


def model(key: jax.Array, theta: jax.Array, n: int) -> jax.Array:
    """Normal records around them."""
    return theta[None] + SD * jax.random.normal(key, (n, DIMS))


def told(name: str, theta: np.ndarray, weights: np.ndarray, seconds: float) -> None:
    """Prints the errors of the means and spreads, in exact standard deviations."""
    variance = float(NOISE.effective_scale(like=RELEASED)) ** 2 + SD**2 / N
    exact, spread = np.asarray(RELEASED) / (1 + variance), np.sqrt(variance / (1 + variance))
    mean = weights @ theta
    found = np.sqrt(weights @ (theta - mean) ** 2)
    off, ratio = np.sqrt(np.mean(((mean - exact) / spread) ** 2)), np.mean(found / spread)
    print(f"{name}: means off by {off:.3f}, spread {ratio:.3f}, {seconds:.1f} s of CPU", flush=True)


def theirs(step: float) -> tuple[np.ndarray, int]:
    """Draws of theta by BlackJAX, and the number of temperatures."""
    world = World.of(jax.random.key(0), PRIVATE, prior, model, N, None)
    latents = Latents.of(world.simulated, jax.random.key(0))

    def density(normal: jax.Array) -> jax.Array:
        return world.log_prob((RELEASED,), latents.evaluate(normal)["values"])

    parameters = {
        "step_size": step,
        "inverse_mass_matrix": jnp.ones(latents.size),
        "num_integration_steps": _KICKS,
    }
    smc = blackjax.adaptive_tempered_smc(
        lambda normal: -0.5 * jnp.sum(normal**2),
        density,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        extend_params(parameters),
        blackjax.smc.resampling.systematic,
        0.5,
        num_mcmc_steps=2 * _MOVES,
    )
    state = smc.init(jax.random.normal(jax.random.key(1), (DRAWS, latents.size)))
    advance: Callable = jax.jit(smc.step)
    count = 0
    while float(state.tempering_param) < 1:
        state, _ = advance(jax.random.fold_in(jax.random.key(2), count), state)
        count += 1
    theta = jax.vmap(lambda row: latents.evaluate(row)["theta"])(state.particles)
    return np.asarray(theta, np.float64), count


def main() -> None:
    """Prints a line for each run; compilation counts, since a posterior is computed once."""
    start = time.process_time()
    found = dpjax.posterior(
        dpjax.random.seeded_key(1),
        RELEASED,
        PRIVATE,
        prior=prior,
        model=model,
        n=N,
        draws=DRAWS,
        method="tempered",
    )
    seconds = time.process_time() - start
    told("dpjax", np.asarray(found.theta, np.float64), found.weights, seconds)
    for step in (0.05, 0.2):
        start = time.process_time()
        theta, count = theirs(step)
        seconds = time.process_time() - start
        told(
            f"BlackJAX, steps of {step}, {count} temperatures",
            theta,
            np.full(DRAWS, 1 / DRAWS),
            seconds,
        )


if __name__ == "__main__":
    main()
