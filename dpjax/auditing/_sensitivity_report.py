"""A table of sensitivities of a target: proved, found by an attack, and sampled."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from dpjax._core import _checks
from dpjax._core._bounds import Ball, RecordBounds
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Oracle, Sensitivity, Target
from dpjax.auditing._adversarial_pair import AdversarialPair, adversarial_pair
from dpjax.proving._prove_sensitivity import (
    NoProofError,
    ProvedNorm,
    prove_sensitivity,
    public_bounds,
)
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._sample_sensitivity import sample_sensitivity


@dataclasses.dataclass(frozen=True, eq=False)
class SensitivityReport:
    """The proved, the adversarial and the sampled sensitivity of a target. It prints as a table.

    Attributes:
        norm: the norm of distances.
        proved: the proved sensitivity; None without a proof.
        adversarial: two neighbors whose values are far apart.
        sampled: maps each gamma to its estimate, or to None if sampling was refused. Empty without
            an oracle.
        refusals: maps the name of each table line without a number to the reason and a remedy.

    Formal guarantees:
        Those of `dpjax.sensitivity_report`, which makes it.
    """

    norm: str
    proved: Sensitivity | None
    adversarial: AdversarialPair
    sampled: dict[float, float | None]
    refusals: dict[str, str]

    def __repr__(self) -> str:
        proved = None if self.proved is None else float(self.proved.value)
        rows = [("proved", proved, "0"), ("adversarial", self.adversarial.distance, "")]
        rows += [("sampled", found, f"{gamma:g}") for gamma, found in self.sampled.items()]
        whole = proved or self.adversarial.distance
        of = "proved" if proved else "adversarial"
        lines = [f"{'':<12}{self.norm + ' sensitivity':>18}{'gamma':>8}  share of {of}"]
        for name, value, gamma in rows:
            shown = "none" if value is None else f"{value:.6g}"
            share = "" if value is None or not whole else f"{value / whole:.3g}"
            lines.append(f"{name:<12}{shown:>18}{gamma:>8}  {share}".rstrip())
        lines += [f"{name}: {text}" for name, text in self.refusals.items()]
        return "\n".join(lines)


def sensitivity_report(
    key: Key,
    target: Target,
    records: Database,
    *,
    bounds: PyTree,
    norm: ProvedNorm,
    oracle: Oracle | None = None,
    gammas: Sequence[float] = (0.2, 0.05, 0.01),
    steps: int = 200,
    restarts: int = 64,
) -> SensitivityReport:
    """Compares the proved sensitivity of a target with estimates by an attack and by sampling.

    All numbers are for the target applied to clamped records, which is what a release with a proved
    sensitivity computes. The result prints as a table. Its last column is each number divided by
    the proved number. If you calibrate noise to a sampled number, the noise is smaller by this
    ratio. But then the guarantee has the gamma of the same row.

    Args:
        key: a typed key.
        target: as for `dpjax.prove_sensitivity`.
        records: as for `dpjax.prove_sensitivity`.
        bounds: as for `dpjax.prove_sensitivity`.
        norm: "l1", "l2" or "linf".
        oracle: as for `dpjax.sample_sensitivity`; without an oracle nothing is sampled.
        gammas: the gammas at which to sample, each above 0 and below 1.
        steps: the number of steps of the search, as for `dpjax.auditing.adversarial_pair`.
        restarts: the number of restarts of the search.

    Returns:
        A `SensitivityReport`, which prints as a table. If there is no proof, or sampling is
        refused, a line below the table gives the reason and a remedy.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if bounds, norm or gammas are invalid, or no record moves the value.

    Formal guarantees:
        The proved number is an upper bound on the true sensitivity, and the adversarial number a
        lower bound. An estimate at gamma has the guarantee of `dpjax.sample_sensitivity` only if
        gamma was chosen before looking at the table. So estimates are plain numbers here. The
        report uses no private data. Estimates include the resolution of the arithmetic, and a
        search may miss the farthest pair, so a sampled number may slightly exceed the adversarial
        number.

    Source:
        As for `dpjax.prove_sensitivity`, `dpjax.auditing.adversarial_pair` and
        `dpjax.sample_sensitivity`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import dpjax
        >>> records = jax.ShapeDtypeStruct((50,), jnp.float32)
        >>> report = dpjax.sensitivity_report(
        ...     jax.random.key(0), jnp.mean, records, bounds=(0, 1), norm="l1", steps=5, restarts=8
        ... )
        >>> print(report)
                        l1 sensitivity   gamma  share of proved
        proved               0.0200...       0  1
        adversarial          0.0199...          1
    """
    key_search, *keys = jax.random.split(sampling_key(key), 1 + len(gammas))
    gammas = tuple(_checks.fraction("gammas", gamma) for gamma in gammas)
    refusals: dict[str, str] = {}
    proved = None
    try:
        proved = prove_sensitivity(target, records, bounds=bounds, norm=norm)
    except NoProofError as refusal:
        refusals["proved"] = str(refusal)
    specs, public = public_bounds(records, bounds)
    enforced = public if proved is None or proved.bounds is None else proved.bounds
    clamped = enforced.enforced_on(target)
    searched = _with_slopes(clamped, public.enforced_on(target))
    adversarial = adversarial_pair(
        key_search, searched, specs, bounds=_searched(public, specs), norm=norm, steps=steps,
        restarts=restarts,
    )  # fmt: skip
    sampled: dict[float, float | None] = {}
    if oracle is not None:
        n = jax.tree.leaves(specs)[0].shape[0]
        for one_key, gamma in zip(keys, gammas, strict=True):
            try:
                found = sample_sensitivity(one_key, clamped, oracle, n=n, norm=norm, gamma=gamma)
                sampled[gamma] = float(found.value)
            except ValueError as refusal:
                sampled[gamma] = None
                refusals[f"sampled at gamma {gamma:g}"] = str(refusal)
    return SensitivityReport(norm, proved, adversarial, sampled, refusals)


def _with_slopes(
    function: Callable[[Database], Value], like: Callable[[Database], Value]
) -> Callable[[Database], Value]:
    """Gives `function` the derivative of `like`.

    `function` may add up integers, and then it has no derivative of its own.
    """

    # `custom_jvp` wraps this new function instead of the target, because JAX would add the default
    # arguments of the target's signature.
    @jax.custom_jvp
    def found(records: Database) -> Value:
        return function(records)

    @found.defjvp
    def _(primals: tuple[Database], tangents: tuple[Database]) -> tuple[Value, Value]:
        _, slope = jax.jvp(like, primals, tangents)
        return function(*primals), slope

    return found


def _searched(public: RecordBounds, specs: Database) -> PyTree:
    """Converts the public bounds to bounds for the search.

    Categories become the interval from the least to the largest category. The target replaces each
    number in the interval by a category.
    """
    found = [bound if isinstance(bound, Ball) else bound.ends for bound in public.leaves]
    return jax.tree.unflatten(jax.tree.structure(specs), found)
