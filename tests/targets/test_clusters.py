"""Targets on the host, spread by joblib's backends for clusters."""

import importlib.util

import pytest

SAME = """
import jax, joblib, numpy as np, dpjax
{start}
def oracle(key, n):
    return jax.random.normal(key, (n, 2))
def column_means(database):
    return database.mean(0)
output = jax.ShapeDtypeStruct((2,), "float32")
target = dpjax.targets.host(column_means, output=output)
def distances():
    return np.asarray(dpjax.sample_distances(
        jax.random.key(0), target, oracle, n=5, norm="l1", m=50))
alone = distances()
with joblib.parallel_config("{backend}", n_jobs=2):
    np.testing.assert_array_equal(distances(), alone)
with joblib.parallel_config("{backend}", n_jobs=2):
    workers = set(joblib.Parallel()(joblib.delayed(__import__("os").getpid)() for _ in range(20)))
print(__import__("os").getpid() not in workers)
"""
START = {
    "dask": """
from distributed import Client, LocalCluster
client = Client(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None))
""",
    "ray": """
import ray
from ray.util.joblib import register_ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
register_ray()
""",
}
MODULES = {"dask": "distributed", "ray": "ray"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", START)
def test_a_cluster_computes_what_one_process_does(backend, run_python):
    if importlib.util.find_spec(MODULES[backend]) is None:
        pytest.skip(f"{MODULES[backend]} is not installed, which no extra of dpjax brings")
    program = SAME.format(start=START[backend], backend=backend)
    body = "\n".join(f"    {line}" for line in program.splitlines())
    # Workers may import the program again, as multiprocessing does.
    assert run_python(f"if __name__ == '__main__':\n{body}").splitlines()[-1] == "True"
