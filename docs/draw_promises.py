"""Draws the picture of docs/guide/promises.md and prints its numbers: on the data of the demo.

Run `python docs/draw_promises.py`. It takes scikit-learn, which ships the patients.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from draw_start import BLUE, VERMILION, draw_light_and_dark

import dpjax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "demo"))
from demo_data import UnitScale, load_patients  # noqa: E402

PAIRS, RECORDS = 20_000, 100


def measured():
    """The profile of the demo's mean, gamma of single patients, and other numbers of the page."""
    public, private = load_patients()
    n, scale = len(private.features), UnitScale.of(public.features)
    oracle = dpjax.oracles.smoothed_resample(public.features)

    def mean(records):
        return jnp.mean(scale(records), axis=0)

    keys = jax.random.split(dpjax.random.seeded_key(0), 6)
    about = {"n": n, "norm": "l1", "gamma": 0.05}
    sensitivity = dpjax.sample_sensitivity(keys[0], mean, oracle, m=PAIRS, **about)
    mechanism = dpjax.laplace(sensitivity, epsilon=1.0)
    profile = dpjax.privacy_profile(keys[1], (mean, mechanism), oracle, n=n, m=PAIRS)
    print(profile)
    watched = dpjax.sample_sensitivity(keys[2], mean, oracle, until=1.05, **about)
    print(f"until=1.05 ended after {watched.m} pairs, at {watched.value:.4g}")

    chosen = public.features[:RECORDS]
    options = {"sensitivity": sensitivity, "n": n, "pairs": 500}
    people = dpjax.gamma_by_record(keys[3], mean, oracle, records=chosen, **options)
    drawn = dpjax.gamma_by_record(keys[4], mean, oracle, records=500, **{**options, "pairs": 100})
    print(f"gamma above .1 for at most {drawn.share_above(0.1):.3g} of people")
    print(f"gamma above .5 for at most {drawn.share_above(0.5):.3g} of people")

    check = dpjax.check_oracle(keys[5], oracle, lambda x: scale(x)[0], n=n, epsilon=0.1)
    wider = dpjax.oracles.smoothed_resample(1.3 * public.features)
    print(f"a check at epsilon .1 notices features x 1.3 with {check.power(keys[0], wider):.2g}")
    return profile, people, np.asarray(scale(chosen)[:, 0])


def promises(axes, profile, people, radius):
    """Gamma and delta at every epsilon, and gamma of single patients."""
    left, right = axes
    epsilons = np.linspace(0, 3, 61)
    gammas = [profile.gamma(float(e)) for e in epsilons]
    left.plot(epsilons, gammas, color=BLUE, linewidth=2, label="gamma: share of worse pairs")
    left.plot(
        epsilons, profile.delta(epsilons), color=VERMILION, linewidth=2, label="delta: average"
    )
    left.axvline(1.0, color="gray", linewidth=1, linestyle=":")
    left.set(yscale="log", ylim=(1e-4, 1), xlabel="epsilon", ylabel="at most")
    left.legend(loc="upper right", fontsize="small")
    estimates = np.asarray(people.estimates)
    error = [estimates - people.lower, people.upper - estimates]
    right.errorbar(radius, estimates, error, fmt="o", ms=3, lw=0.8, color=BLUE)
    right.axhline(0.05, color=VERMILION, linewidth=2, label="gamma of the average person")
    right.set(xlabel="mean radius of the tumor, scaled", ylabel="gamma of one patient")
    right.legend(loc="upper left", fontsize="small")


if __name__ == "__main__":
    found = measured()
    draw_light_and_dark("promises", lambda axes: promises(axes, *found), (7.6, 3.2), columns=2)
