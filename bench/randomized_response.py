"""A million answers by randomized response, against OpenDP and diffprivlib."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import opendp.prelude as opendp

import dpjax
from harness import Race, Row, record
from releases import diffprivlib_mechanisms

ANSWERS, CATEGORIES, EPSILON = 10**6, 10, 1.0
# The peers would take a minute for everything: they take one answer a call.
PART = 4000


def run(rounds: int = 5) -> None:
    """Two categories, and ten."""
    opendp.enable_features("contrib")
    _binary(rounds)
    _categories(rounds)


def _binary(rounds: int) -> None:
    """Yes or no."""
    truth = math.exp(EPSILON) / (1 + math.exp(EPSILON))
    in_opendp = opendp.m.make_randomized_response_bool(prob=truth)
    in_diffprivlib = diffprivlib_mechanisms().Binary(epsilon=EPSILON, value0="0", value1="1")
    answers = np.arange(ANSWERS) % 5 == 0
    booleans = answers[:PART].tolist()
    words = ["1" if answer else "0" for answer in booleans]
    peers = {
        "OpenDP": lambda: np.array([in_opendp(answer) for answer in booleans]),
        "diffprivlib": lambda: np.array([in_diffprivlib.randomise(w) == "1" for w in words]),
    }
    mechanism = dpjax.randomized_response(EPSILON)
    _race("10^6 randomized responses, 2 categories", mechanism, answers, peers, rounds)


def _categories(rounds: int) -> None:
    """One of ten answers, which diffprivlib does not draw at this guarantee."""
    truth = math.exp(EPSILON) / (CATEGORIES - 1 + math.exp(EPSILON))
    in_opendp = opendp.m.make_randomized_response(list(range(CATEGORIES)), truth)
    answers = np.arange(ANSWERS) % CATEGORIES
    part = answers[:PART].tolist()
    peers = {"OpenDP": lambda: np.array([in_opendp(answer) for answer in part])}
    mechanism = dpjax.randomized_response(EPSILON, CATEGORIES)
    _race("10^6 randomized responses, 10 categories", mechanism, answers, peers, rounds)


def _race(
    job: str,
    mechanism: Any,
    answers: np.ndarray,
    peers: dict[str, Callable[[], np.ndarray]],
    rounds: int,
) -> None:
    """The draw and the frequencies; first, that all keep as many answers as they should."""
    on_device, key = jnp.asarray(answers), dpjax.random.seeded_key(0)

    def ours() -> np.ndarray:
        return np.asarray(mechanism(key, on_device).value)

    kept = {"dpjax": float(np.mean(ours() == answers))}
    kept |= {name: float(np.mean(draw() == answers[:PART])) for name, draw in peers.items()}
    expected = mechanism.report_weights[0] / 2**32
    # Of 4000 answers the share that is kept varies by .8% at most.
    assert all(abs(share - expected) < 0.04 for share in kept.values()), (kept, expected)
    race = Race(
        {
            "dpjax": ours,
            "dpjax, frequencies": lambda: dpjax.queries.frequencies(ours(), mechanism),
            **peers,
        },
        rounds=rounds,
    )
    rows = [
        Row(
            job,
            f"{name}, loop ({PART:,} answers, scaled)",
            race.seconds["dpjax"],
            race.seconds[name] * ANSWERS / PART,
            10,
        )
        for name in peers
    ]
    record(
        job,
        rows,
        race=race,
        sizes={"answers": ANSWERS, "answers of the peers": PART},
        results={"kept": kept, "expected": expected},
        work={"bytes": 8.0 * ANSWERS, "flops": 0.0},
    )


if __name__ == "__main__":
    run()
