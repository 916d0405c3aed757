"""Upper limits on the calls that a reader has to follow, see calls.py."""

import calls

# Calls, and files that they lead to. Those of a sampling depend a little on how fast it runs.
LIMITS = {
    "warm mean, 1,000 records": (50, 8),
    "warm histogram, 1,000 records": (64, 10),
    "trace of a step of DP-SGD": (1850, 17),
    "warm sampling in one chunk": (360, 26),
    "warm step of DP-SGD": (24, 8),
    "10 further steps of fit": (71, 6),
    "10 further chunks of a sampling": (176, 8),
}


def test_no_run_makes_more_calls_than_its_limit():
    found = {name: calls.sizes(counter) for name, counter in calls.counted().items()}
    beyond = {
        name: (number, files)
        for name, (number, _, files) in found.items()
        if number > LIMITS[name][0] or files > LIMITS[name][1]
    }
    assert not beyond
