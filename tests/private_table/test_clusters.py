"""Tables that workers hold: each sends totals of its partitions, and one process draws noise."""

import numpy as np
import pandas as pd
import pytest

import dpjax

pytestmark = pytest.mark.slow
KEY = dpjax.random.seeded_key(3)
N = 1000
GENERATOR = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "ward": pd.array(np.array(["north", "east", "south"])[GENERATOR.integers(0, 3, N)], "str"),
        "cost": GENERATOR.gamma(2, 100, N).round(2),
    }
)


def statistics(source):
    """Statistics of a table of each kind, with fixed keys."""
    table = dpjax.PrivateTable(source, most_rows=2 * N)
    by = {"ward": ["east", "north"]}
    mean = table.mean("cost", bounds=(0, 500), by=by, epsilon=1.0, key=KEY).value
    where = table.count(where=lambda row: row["cost"] > 200.0, epsilon=1.0, key=KEY).value
    of = {"epsilon": 5.0, "delta": 0.1, "key": KEY}
    keys = table.keys("ward", **of).value
    assert keys == ("east", "north", "south")
    distinct = table.count_distinct("cost", epsilon=1.0, key=KEY).value
    clusters = table.k_means(["cost"], bounds=(0, 500), clusters=2, by=by, **of).value
    return np.asarray(mean).tolist(), int(where), int(distinct), clusters["centers"].tolist()


@pytest.mark.filterwarnings("ignore")
def test_partitions_of_dask_have_the_bits_of_the_table_in_memory():
    dask = pytest.importorskip("dask.dataframe")
    distributed = pytest.importorskip("distributed")
    expected = statistics(FRAME)
    frame = dask.from_pandas(FRAME, npartitions=3)
    assert statistics(frame) == expected
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as two,
        distributed.Client(two),
    ):
        assert statistics(frame) == expected


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_ray_have_the_bits_of_the_table_in_memory(monkeypatch):
    ray = pytest.importorskip("ray")
    data = pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_DISABLE_METRICS_COLLECTION", "1")
    data.DataContext.get_current().enable_progress_bars = False
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        blocks = data.from_pandas([FRAME[:300], FRAME[300:300], FRAME[300:950], FRAME[950:]])
        expected = statistics(FRAME)
        assert statistics(blocks) == expected
        assert statistics(lambda: blocks.iter_batches(batch_format="pyarrow")) == expected
        with pytest.raises(ValueError, match="fixed order"):
            dpjax.PrivateTable(blocks, most_rows=N, person="ward", rows=1)
    finally:
        ray.shutdown()
