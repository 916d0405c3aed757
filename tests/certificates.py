"""Certificates of the tables of noise, computed from the weights that are stored.

They compare the stored weights with masses that are exact to 2^-300.
"""

import math
from fractions import Fraction

from dpjax.random import _lattice


def weights_of(table: _lattice.AliasTable) -> list[int]:
    """How many words lead to each outcome of a table."""
    capacity = 2 ** (table.width - _lattice.SLOT_BITS)
    weights = [0] * _lattice.SLOTS
    for slot in range(_lattice.SLOTS):
        stored = 0
        for row in table.limbs:
            stored = stored << 32 | int(row[slot])
        alias, own = stored >> (table.width - _lattice.SLOT_BITS), stored % capacity
        weights[slot] += own
        weights[alias] += capacity - own
    return weights


def exponential_certificate() -> _lattice.Certificate:
    """The certificate of `lattice_exponential` and `lattice_laplace`, from the stored weights.

    delta is 0, because the tables reach every lattice point. After j restarts, the probability of a
    point has the j-th power of the error of the weight "24 more". So does noise whose scale differs
    by 2^-58 of it, and `_grid_fit._OUTWARD` covers that.
    """
    # Digits are independent, so errors of tables multiply, and logarithms add up. With a weight
    # of 0, a point would be impossible, which no loss bounds.
    loss = 0.0
    for table, masses in zip(
        _lattice.exponential_tables(), _lattice.exponential_masses(), strict=True
    ):
        total = sum(masses)
        weights = weights_of(table)[: len(masses)]
        loss += max(
            abs(float(Fraction(weight * total, mass << table.width) - 1)) if weight else math.inf
            for weight, mass in zip(weights, masses, strict=True)
        )
    return _lattice.Certificate(loss * (1 + 1e-9), 0.0)  # The factor covers the floats of this sum.


def gaussian_certificate() -> _lattice.Certificate:
    """The certificate of `lattice_gaussian`, from the stored weights.

    docs/proofs/exact-noise.md, "Gaussian noise", has the proof. The coarsest level is charged as an
    exceptional mass, delta. Every other level is charged as a relative error, loss: a point n of
    the finer lattice is reached from points 128 j of the coarser one, so the errors of all these
    paths are divided by the mass of the likeliest path alone.
    """
    top, low = _lattice.gaussian_tables()
    top_masses, low_masses = _lattice.gaussian_masses()
    top_total, low_total = sum(top_masses), sum(low_masses)
    top_error = sum(
        abs(Fraction(weight, 2**top.width) - Fraction(mass, top_total))
        for weight, mass in zip(weights_of(top), top_masses, strict=True)
    )
    # The mass beyond the table: two tails, at most twice that with the rescaling of the rest.
    cut = 4 * math.exp(-(_lattice._CENTER**2) / (2 * _lattice._TOP**2))
    low_error = max(
        abs(Fraction(weight, 2**low.width) - Fraction(mass, low_total))
        for weight, mass in zip(weights_of(low), low_masses, strict=True)
    )
    spacing = 2**_lattice._LEVEL_BITS
    # The nearest point 128 j is at most 64 away: n has at least this mass, times that of j.
    nearest = math.exp(-((spacing / 2) ** 2) / (2 * _lattice._LOW**2)) / (
        _lattice._LOW * math.sqrt(2 * math.pi)
    )
    reach = _lattice._CENTER // spacing + 1
    # A coarser point m further away is at most exp(16 m / 136) times as likely as the nearest one
    # while |j| <= 16 * 136, and the tables end before that. Such a path has the error of one weight
    # if m is within the finer table; beyond the table its whole mass is missing.
    likelier = sum(math.exp(16 * m / _lattice._TOP) for m in range(-reach, reach + 1))
    beyond = sum(
        2 * math.exp(16 * m / _lattice._TOP - (spacing * (m - 0.5)) ** 2 / (2 * _lattice._LOW**2))
        for m in range(reach, 10 * reach)
    )
    # Two Gaussians add up to a Gaussian only up to this factor: Poisson's summation formula.
    smoothing = 4 * math.exp(
        -2 * math.pi**2 / ((spacing / _lattice._LOW) ** 2 + 1 / _lattice._TOP**2)
    )
    level = (float(low_error) * likelier + beyond) / nearest + smoothing
    # The discrete Gaussian against the rounded one, up to 40 standard deviations.
    rounding = 40**2 / (24 * _lattice.GAUSSIAN_RESOLUTION**2)
    loss = (
        2 * (_lattice._LEVELS - 1) * level + rounding
    )  # Twice: |log(1 + r)| <= 2 |r| for small r.
    return _lattice.Certificate(loss, (float(top_error) + cut) * (1 + 1e-9))
