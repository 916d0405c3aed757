"""All pairs of neighbors over a few values, and the bounds of a program in every norm."""

import itertools

import numpy as np

from dpjax.proving import _prove_sensitivity
from dpjax.proving._rows import norm_of

VALUES = (-1.0, 0.25, 1.0)
N = 3


def all_pairs(values, dims=()):
    """Every database over a few values, and every neighbor of it."""
    rows = list(itertools.product(values, repeat=int(np.prod(dims, dtype=int))))
    databases = np.array(list(itertools.product(rows, repeat=N)), np.float32)
    databases = databases.reshape(-1, N, *dims)
    pairs = [
        (i, np.where((np.arange(N) == place).reshape(-1, *[1] * len(dims)), new, databases[i]))
        for i in range(len(databases))
        for place in range(N)
        for new in np.array(rows, np.float32).reshape(-1, 1, *dims)
    ]
    return databases[[i for i, _ in pairs]], np.array([other for _, other in pairs], np.float32)


def traced(target, spec, bounds):
    """The program that is walked, for `outputs_of`."""
    public = _prove_sensitivity.record_bounds(bounds, spec)
    program = _prove_sensitivity.traced(target, spec, public)
    return _prove_sensitivity._after_the_clamp(program, spec, public), program, public


def outputs_of(target, spec, bounds):
    """The abstract values of the outputs, from one walk."""
    return _prove_sensitivity._walk(*traced(target, spec, bounds))[1]


def bounds_of(target, spec, bounds):
    """The bounds in all three norms, from one walk."""
    outputs = outputs_of(target, spec, bounds)
    return {norm: norm_of(outputs, norm) for norm in ("l1", "l2", "linf")}
