"""The demo: what it prints is what its releases promise."""

import re

import pytest

from dpjax._core._values import Guarantee
from dpjax.accounting import compose

RUN = """
import runpy, sys
sys.path.insert(0, "demo")
runpy.run_path("demo/demo.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_demo_prints_the_guarantees_of_its_releases(run_python):
    printed = run_python(RUN)
    under_rows = re.findall(r"^    (\S.*)$", printed, re.MULTILINE)
    assert [row.split(":")[0] for row in under_rows[1::2]] == ["profile"] * 4
    pure, gaussian = (f"(epsilon=1, delta={delta}, gamma=0.05)-random DP" for delta in (0, "1e-05"))
    assert under_rows[::2] == [f"{x}, confidence 0.99" for x in (pure, gaussian, pure, pure)]
    # Releases about other people are not composed.
    together = compose(*(Guarantee(1.0, delta, 0.05, 0.99) for delta in (0.0, 1e-5, 0.0)))
    assert repr(together) in " ".join(printed.split())
    assert "All noise was drawn in integers" in " ".join(printed.split())
