"""The time of estimating a graphical model: dpjax's mirror descent on the host, beside mbi 2.0.

The table is that of bench/synthetic.py. Marginals of single columns and of some pairs have Gaussian
noise. Each set of marginals has three pairs more than the one before, as the stages of AIM. mbi
compiles a program for each set. Its time on the same set again is printed, too. This needs
`pip install "mbi>=2"`; OpenDP, for bench/synthetic.py, needs mbi 1.1.
"""

import itertools
import time
import warnings

import numpy as np

from dpjax.queries._aim import Estimator, Measurement
from synthetic import SIZES, made

SCALE, ITERATIONS = 40.0, 150
PAIRS = list(itertools.combinations(SIZES, 2))[::3]


def measured(columns: tuple[str, ...], table: dict[str, np.ndarray]) -> Measurement:
    """A noisy marginal; the noise is public, so any generator will do."""
    counts = np.zeros([SIZES[name] for name in columns])
    np.add.at(counts, tuple(table[name] for name in columns), 1)
    noise = np.random.default_rng(0).normal(size=counts.shape)
    return Measurement(columns, counts + SCALE * noise, SCALE)


def main() -> None:
    """Prints the CPU time of each estimate."""
    warnings.simplefilter("ignore")
    import mbi  # Warns of JAX in float32, which this does not need.

    table, domain = made(), mbi.Domain(list(SIZES), list(SIZES.values()))
    ours, theirs = Estimator(SIZES), mbi.estimation.MirrorDescent()
    warm = None
    for pairs in (3, 6, 9):
        names = [*((name,) for name in SIZES), *PAIRS[:pairs]]
        some = [measured(name, table) for name in names]
        start = time.process_time()
        ours(some)
        seconds = [time.process_time() - start]
        given = [mbi.LinearMeasurement(one.counts.ravel(), one.columns, SCALE) for one in some]
        for before in (warm, warm):
            start = time.process_time()
            found = theirs.estimate(domain, given, warm_start=before, iters=ITERATIONS)
            seconds.append(time.process_time() - start)
        warm = found
        words = "dpjax {:.2f} s, mbi {:.2f} s, again {:.2f} s of CPU".format(*seconds)
        print(f"{len(names)} marginals: {words}", flush=True)


if __name__ == "__main__":
    main()
