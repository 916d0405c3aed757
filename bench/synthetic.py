"""How far the pairs of columns of a synthetic table are off, beside AIM and MST by mbi.

The table is like the Adult census: ten columns, 20,000 rows, made here. Every library has the same
public cells, add-or-remove-one of one row, epsilon and delta 1e-6. A row of bench/results is the
average distance of all 45 pairs in total variation, over all runs. `--runs` and `--peer-runs` set
the number of tables, and `--epsilons` and `--peers` choose some. OpenDP 0.16 needs mbi 1.1, which
`opendp[mbi]` brings. It compiles programs for every table, in minutes on two cores.

The MST of smartnoise-synth 1.0.8 takes the number of rows as public. Its dependencies conflict with
those of this bench, and its MST needs few of them: install smartnoise-synth, smartnoise-sql,
disjoint-set, Faker, antlr4-python3-runtime 4.9.3, PyYAML, sqlalchemy, greenlet and sqlparse with
`pip install --no-deps --target DIR`, and add DIR to PYTHONPATH. Without them, leave it out.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import time
import warnings
from typing import Any

import numpy as np
import opendp.prelude as dp
import pandas as pd
import polars as pl

import dpjax
import harness
from dpjax.accounting._concentrated import largest_rho

SIZES = {
    "age": 16,
    "work": 8,
    "school": 16,
    "married": 7,
    "occupation": 14,
    "relation": 6,
    "race": 5,
    "sex": 2,
    "hours": 10,
    "income": 2,
}
PAIRS = list(itertools.combinations(SIZES, 2))
ROWS, DELTA = 20_000, 1e-6
JOB, TABLE = "synthetic table, pairs", "like Adult, n = 20,000"
ALGORITHMS = {"OpenDP AIM": dp.mbi.AIM, "OpenDP MST": dp.mbi.MST}
SMARTNOISE = "smartnoise MST"


def made() -> dict[str, np.ndarray]:
    """Cells of people whose columns depend on each other as those of a census do."""
    rng, n = np.random.default_rng(0), ROWS

    def cells(share: np.ndarray, size: int) -> np.ndarray:
        return np.clip(share * size, 0, size - 1).astype(int)

    z = rng.random(n)
    age = 0.4 * z + 0.6 * rng.beta(2, 3, n)
    school = 0.8 * rng.beta(3, 3, n) + 0.2 * z
    sex = (rng.random(n) < 0.33).astype(int)
    married = np.where(
        age < 0.3,
        rng.random(n) < 0.2,
        rng.choice(7, n, p=[0.12, 0.55, 0.15, 0.05, 0.05, 0.04, 0.04]),
    ).astype(int)
    alone = 2 + (rng.random(n) < 0.3) + (married > 2) + (rng.random(n) < 0.1)
    work = rng.choice(8, n, p=[0.7, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03, 0.01])
    hours = 0.4 + 0.1 * (sex == 0) + 0.15 * rng.normal(size=n) - 0.1 * (age < 0.2)
    logit = -4 + 4 * school + 1.5 * (married == 1) + 2 * age
    return {
        "age": cells(age, 16),
        "work": np.where(school > 0.7, (work + rng.integers(0, 3, n)) % 8, work),
        "school": cells(school, 16),
        "married": married,
        "occupation": np.clip((school * 10).astype(int) + rng.integers(0, 4, n) + sex, 0, 13),
        "relation": np.clip(np.where(married == 1, 1 - sex, alone), 0, 5),
        "race": rng.choice(5, n, p=[0.85, 0.09, 0.03, 0.02, 0.01]),
        "sex": sex,
        "hours": cells(hours, 10),
        "income": (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(int),
    }


def off(private: dict[str, np.ndarray], drawn: Any) -> float:
    """The average distance of all pairs, in total variation."""

    def shares(table: Any, pair: tuple[str, str]) -> np.ndarray:
        counts = np.zeros([SIZES[name] for name in pair])
        np.add.at(counts, tuple(np.asarray(table[name], int) for name in pair), 1)
        return counts / counts.sum()

    found = [np.abs(shares(private, pair) - shares(drawn, pair)).sum() / 2 for pair in PAIRS]
    return float(np.mean(found))


@dataclasses.dataclass
class Contest:
    """The private table, and ways to make others of it."""

    private: dict[str, np.ndarray]

    def ours(self, epsilon: float, run: int) -> Any:
        """By dpjax, as many rows as there are."""
        table = dpjax.PrivateTable(self.private, most_rows=2 * ROWS)
        keys = {name: range(size) for name, size in SIZES.items()}
        key = dpjax.random.seeded_key(run)
        how = {"epsilon": epsilon, "delta": DELTA, "key": key}
        return table.synthetic(rows=ROWS, keys=keys, **how).value

    def theirs(self, name: str, epsilon: float) -> Any:
        """By a peer, as many rows as there are."""
        return self.smartnoise(epsilon) if name == SMARTNOISE else self.opendp(name, epsilon)

    def smartnoise(self, epsilon: float) -> Any:
        """By the MST of smartnoise-synth, which reads the cells from the table."""
        from snsynth.mst import MSTSynthesizer  # pyright: ignore[reportMissingImports]

        table = pd.DataFrame(self.private)
        made = MSTSynthesizer(epsilon=epsilon, delta=DELTA)
        made.fit(table, categorical_columns=list(SIZES), preprocessor_eps=0.0)
        return made.sample(ROWS)

    def opendp(self, name: str, epsilon: float) -> Any:
        """By OpenDP, for the largest rho that implies this epsilon at this delta."""
        # The parts of some budgets add up to more than the whole in OpenDP, by their last digits.
        algorithm, rho = ALGORITHMS[name], float(f"{largest_rho(epsilon, DELTA) * 0.995:.3g}")
        context = dp.Context.compositor(
            data=pl.LazyFrame(self.private),
            privacy_unit=dp.unit_of(contributions=1),
            privacy_loss=dp.loss_of(rho=rho),
        )
        query = context.query(rho=rho).select(*SIZES)
        keys = {name: list(range(size)) for name, size in SIZES.items()}
        table = query.contingency_table(keys=keys, algorithm=algorithm()).release()
        # A null stands for other keys, which no row has.
        return table.synthesize(ROWS).drop_nulls()


def main() -> None:
    """Measures, and keeps what was measured at other epsilons."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--peer-runs", type=int, default=5)
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.1, 1.0, 4.0])
    parser.add_argument("--peers", nargs="*", default=list(ALGORITHMS))
    asked = parser.parse_args()
    dp.enable_features("contrib", "honest-but-curious")
    warnings.simplefilter("ignore")
    contest, file = Contest(made()), harness.RESULTS / "accuracy.json"
    columns = np.random.default_rng(0)
    apart = {name: columns.permutation(cells) for name, cells in contest.private.items()}
    print(f"independent columns: {off(contest.private, apart):.4f}", flush=True)
    kept = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = {(row["job"], row["table"]): row for row in kept["rows"]}
    row = rows.setdefault((JOB, TABLE), {"job": JOB, "table": TABLE, "reason": "", "at": {}})
    for epsilon in asked.epsilons:
        at = row["at"].setdefault(str(epsilon), {"ours": None, "peers": {}, "covered": None})
        if asked.runs:
            found = [timed(contest.ours, epsilon, run) for run in range(asked.runs)]
            at["ours"] = report("dpjax", epsilon, contest, found)
        for name in asked.peers:
            found = [timed(contest.theirs, name, epsilon) for _ in range(asked.peer_runs)]
            at["peers"][name] = report(name, epsilon, contest, found)
        row["runs"] = asked.runs or row.get("runs", 0)
        kept |= {"date": datetime.date.today().isoformat(), "rows": [*rows.values()]}
        file.write_text(json.dumps(kept, indent=1) + "\n")


def timed(make: Any, *given: Any) -> tuple[Any, float]:
    """A table, and the CPU time of making it."""
    start = time.process_time()
    return make(*given), time.process_time() - start


def report(name: str, epsilon: float, contest: Contest, found: list[tuple[Any, float]]) -> float:
    """The average distance; prints it with its spread and the CPU time of a table."""
    errors = [off(contest.private, table) for table, _ in found]
    seconds = np.mean([time for _, time in found])
    spread = np.std(errors) / np.sqrt(len(errors))
    print(f"{name} at {epsilon}: {np.mean(errors):.4f} ± {spread:.4f}, {seconds:.1f} s", flush=True)
    return float(np.mean(errors))


if __name__ == "__main__":
    main()
