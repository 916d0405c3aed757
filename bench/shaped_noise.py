"""Energy of shaped against isotropic noise at one guarantee: logistic regression of patients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import dpjax
from dpjax import targets
from harness import Race, Row, record

PUBLIC, N, GAMMA, FRESH = 200, 369, 0.05, 20_000
SETTINGS = {
    ("resampled", 0.1): 0.60,
    ("resampled", 0.01): None,
    ("class Gaussians", 0.1): None,
    ("smoothed", 0.1): None,
}


def public_records() -> dict[str, jax.Array]:
    """The demo's 200 public patients, by features of mean 0 and deviation 1."""
    data = load_breast_cancer()
    rows = np.random.default_rng(0).permutation(len(data.target))[:PUBLIC]
    x = data.data[rows]
    x = (x - x.mean(0)) / x.std(0)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(data.target[rows])}


def oracles() -> dict[str, dpjax.Oracle]:
    """Models of the private patients: the first keeps their correlations, the last least."""
    public = public_records()
    return {
        "resampled": dpjax.oracles.resample(public),
        "class Gaussians": dpjax.oracles.class_gaussians(public),
        "smoothed": dpjax.oracles.smoothed_resample(public),
    }


def energy(mechanism: dpjax.mechanisms.AdditiveMechanism, d: int) -> float:
    """The expected squared length of the noise that is really drawn."""
    if isinstance(mechanism.norm, dpjax.NoiseShape):
        each = float(np.sum(mechanism.norm.matrix**2))
        return float(mechanism.effective_scale()) ** 2 * each
    return float(mechanism.effective_scale((d,))) ** 2 * d


def run() -> None:
    """Energies and coverage; the times are of both samplings against one in the norm l2."""
    results = {}
    for (name, strength), goal in SETTINGS.items():
        fit, oracle = targets.logistic_regression(regularization=strength), oracles()[name]
        key_shape, key_sample, key_fresh = jax.random.split(jax.random.key(13), 3)
        sample = functools.partial(
            dpjax.sample_sensitivity, key_sample, fit, oracle, n=N, gamma=GAMMA
        )
        shape = dpjax.noise_shape(key_shape, fit, oracle, n=N)
        shaped = dpjax.shaped_gaussian(sample(norm=shape), 1.0, 1e-5)
        isotropic = dpjax.gaussian(sample(norm="l2"), 1.0, 1e-5)
        fresh = dpjax.sample_distances(key_fresh, fit, oracle, n=N, norm=shape, m=FRESH)
        coverage = float(jnp.mean(fresh <= shaped.sensitivity.value))
        ratio = energy(shaped, 30) / energy(isotropic, 30)
        results[f"{name}, lambda = {strength:g}"] = {"energy": ratio, "coverage": coverage}
        print(f"{name}, lambda = {strength:g}: energy {ratio:.3f}, coverage {coverage:.4f}")
        assert coverage >= 1 - GAMMA, coverage
        assert goal is None or ratio <= goal, ratio
    fit, oracle = targets.logistic_regression(regularization=0.1), oracles()["resampled"]
    keys = jax.random.split(jax.random.key(13))

    def isotropic_noise() -> None:
        dpjax.sample_sensitivity(keys[1], fit, oracle, n=N, norm="l2", gamma=GAMMA)

    def shaped_noise() -> None:
        shape = dpjax.noise_shape(keys[0], fit, oracle, n=N)
        dpjax.sample_sensitivity(keys[1], fit, oracle, n=N, norm=shape, gamma=GAMMA)

    race = Race({"shaped": shaped_noise, "isotropic": isotropic_noise}, rounds=3)
    saved = results["resampled, lambda = 0.1"]["energy"]
    row = Row(
        f"logistic regression, d = 30, lambda = .1, m = 900: {saved:.2f} of the noise's energy",
        "isotropic noise, at the same guarantee",
        race.seconds["shaped"],
        race.seconds["isotropic"],
    )
    record("shaped noise", [row], race=race, sizes={"n": N, "d": 30}, results=results)


if __name__ == "__main__":
    run()
