"""The check of a device, on the CPU at a small size, and that it can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from accelerators import exactness, report

ROOT = Path(__file__).parents[2]
SMALL, FULL = 2**12, 2**20


@pytest.mark.slow
@pytest.mark.long
def test_it_runs_on_a_cpu(tmp_path):
    """All of it: the recorded bits are those of this CPU too, whoever made it."""
    environment = {**os.environ, "DPJAX_RESULTS": str(tmp_path)}
    command = [sys.executable, str(ROOT / "bench" / "on_device.py"), "--small"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jobs = [json.loads(line)["job"] for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert {"exactness", "elementary functions", "clipping", "ceilings", "program"} <= set(jobs)
    table = report.measured(tmp_path / "cpu.jsonl")
    assert "| Laplace, scalar |" in table
    assert "of products" in table or "of copy" in table


def test_every_exact_computation_is_recorded():
    for size in (SMALL, FULL):
        digests = exactness.recorded(size)
        assert set(digests) == set(exactness.exact(16))


def test_one_bit_changes_a_digest():
    x = np.arange(4, dtype=np.float32)
    other = np.nextafter(x, np.float32(9))
    found = {exactness.digest(y) for y in (x, other, x[None], x.astype(np.int32), jnp.asarray(x))}
    assert len(found) == 4


def test_an_error_of_an_elementary_function_is_seen(monkeypatch):
    """Of as many units as a product in bfloat16 has, which a GPU might take."""
    rough = exactness.ELEMENTARY["exp"]._replace(
        device=lambda x: jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32)
    )
    monkeypatch.setitem(exactness.ELEMENTARY, "exp", rough)
    assert exactness.elementary_errors(1000, np.dtype(np.float32))["exp"] > 1
