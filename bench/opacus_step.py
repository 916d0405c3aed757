"""A step of DP-SGD by Opacus, for bench/dp_sgd.py: runs in an environment with torch and opacus.

Prints seconds by model and mode, and the epsilons of a training, as JSON. Needs no dpjax.
"""

import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
MODES = ("hooks", "ghost")
Job = dict[str, Any]


def models() -> dict[str, Callable[[], nn.Module]]:
    """The models of bench/dp_sgd.py; the padding of its CNN is that of "SAME" at stride 2."""
    return {
        "784-128-10": lambda: nn.Sequential(
            nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        ),
        "small CNN": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.ZeroPad2d((0, 1, 0, 1)),
            nn.Conv2d(1, 16, 3, stride=2),
            nn.ReLU(),
            nn.ZeroPad2d((0, 1, 0, 1)),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(7 * 7 * 32, 64),
            nn.ReLU(),
            nn.Linear(64, CLASSES),
        ),
    }


def step(model: nn.Module, mode: str, job: Job) -> Callable[[], None]:
    """A whole step: clipped gradients, noise in floats from a fast generator, and SGD."""
    torch.manual_seed(0)
    x = torch.randn(job["batch"], 784)
    y = torch.randint(0, CLASSES, (job["batch"],))
    criterion: Any = nn.CrossEntropyLoss()
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=job["rate"]),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=job["batch"]),
        criterion=criterion,
        noise_multiplier=job["noise"],
        max_grad_norm=job["clip_norm"],
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    model, optimizer = private[0], private[1]
    if len(private) == 4:  # Ghost clipping goes through the loss.
        criterion = private[2]

    def run() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return run


def least_seconds(run: Callable[[], None], rounds: int) -> float:
    """Of several runs, after two that do not count."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def epsilons(job: Job) -> dict[str, float]:
    """Of the training of this job, by both accountants."""
    found = {}
    for name, accountant in (("prv", PRVAccountant()), ("rdp", RDPAccountant())):
        accountant.history = [(job["noise"], job["sample_rate"], job["steps"])]
        found[name] = float(accountant.get_epsilon(delta=job["delta"]))
    return found


def main() -> None:
    """Reads a job as JSON from the command line."""
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    seconds: dict[str, dict[str, float]] = {}
    for name, make in models().items():
        seconds[name] = {}
        for mode in MODES:
            seconds[name][mode] = least_seconds(step(make(), mode, job), job["rounds"])
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
    print(json.dumps({"seconds": seconds, "epsilons": epsilons(job), "versions": versions}))


if __name__ == "__main__":
    main()
