"""From a target and a mechanism to a private function of the database."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy, KnowsAccuracy
from dpjax._core._open_ledgers import Drawing, OpenLedger, Request
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._types import Database, Key, Value
from dpjax._core._values import (
    Inside,
    Mechanism,
    Release,
    Sensitivity,
    Target,
)
from dpjax._tracing._host_calls import host_errors
from dpjax._tracing._programs import Program, apart, evaluate_alone
from dpjax.random._facade import check_key
from dpjax.release._ahead import compile_ahead, known_ahead
from dpjax.release._database import released_records
from dpjax.release._known_sensitivity import check_maker, covering, inside_of, knowing, needed
from dpjax.release._requests import request_of
from dpjax.release._transaction import guarantee_under, pay_and_draw

# XLA's tests allow exp, log, tanh and others 40 units of rounding there, and far more on a TPU.
_PROVED_ON = frozenset(("cpu", "gpu", "cuda", "rocm"))


def privatize(
    target: Target, mechanism: Mechanism, *, ledger: OpenLedger | None = None
) -> Callable[..., Release]:
    """A private version of a target: `private(key, database, *, name=None) -> Release`.

    Computes f(D) and releases it: the last step of Algorithm 2 (Sample-Then-Respond).

    Args:
        target: the function that was sampled.
        mechanism: calibrated to its sensitivity, as `dpjax.laplace(sensitivity, epsilon)`. A query,
            and any target with a method `sensitivity`, is asked for it: the mechanism's must be at
            least as large.
        ledger: a `dpjax.Ledger`, whose budget pays for every release before its noise is drawn, or
            a `dpjax.random.KeyLedger`, whether it is open or not; then not jit-able.

    Returns:
        A function of a typed key and a database: a pytree of arrays with leading axis n, where a
        DataFrame counts as the dict of its columns. Without x64 a query gets all numbers of 64
        bits; a sampled function gets those of the oracle's dtype, clamped to its range. Jit-able,
        and vmap-able over keys. `name` is a public name of these records, such as a column or a
        group: a `dpjax.Ledger` that has paid for the same release under the same name returns it
        again, under any key, free of charge.
        Without a name every release is drawn anew and paid for; without a ledger it means nothing.

    Raises:
        TypeError: if the target is not a function, or mechanism or ledger are none; at a release,
            if the key is not a typed key, the name not a text, the database does not hold arrays of
            the kinds that were sampled, or it holds integers of 64 bits without x64 and nothing but
            a bare number is known of the target.
        ValueError: if the target is not the one that was sampled (the traced programs and their
            constants are compared), or the sensitivity is what another query or target says of
            itself; at a release, if the target is known to move further than the sensitivity says,
            the database has another size or structure, shows its number of records where that is
            private, or the ledger knows the key.
        BudgetExceededError: at a release, if the ledger has too little left.
        LedgerError: at a release, if the ledger cannot be trusted or not be written.

    Formal guarantees:
        Each release has `mechanism.guarantee`, if the database is a draw from the oracle that the
        sensitivity was sampled from, and the target was fixed without looking at it. Nothing that
        the database holds decides whether a release happens; its structure, dtypes and size do, and
        count as public, so read a file with dtypes that do not depend on what it holds. Under
        add-or-remove-one the size is private: the database must be `dpjax.queries.PaddedRecords`,
        unless the sensitivity says how many slots there are (its n). For an analytic sensitivity
        the claim that it bounds this target, on databases of this size, is yours, unless the target
        knows its own. A traced one that is too small gives NaN. A sampled one may be smaller than
        the known one: gamma says how often that is not enough. That two releases under one name ask
        about the same records is yours too: a ledger does not look at what they hold. Choose names
        without looking at them either.

    Source:
        Rubinstein and Aldà (2017), Algorithm 2 and Theorem 15.

    Example:
        >>> import dpjax
        >>> import jax.numpy as jnp
        >>> private_mean = dpjax.privatize(jnp.mean, dpjax.laplace(1 / 100, epsilon=1.0))
        >>> release = private_mean(dpjax.random.seeded_key(0), jnp.full(100, 0.5))
        >>> release.guarantee
        (epsilon=1, delta=0)-DP, under replace-one, seeded key
    """
    _checks.function("target", target)
    if ledger is not None and not isinstance(ledger, OpenLedger):
        raise TypeError(
            "ledger must be a dpjax.Ledger or a dpjax.random.KeyLedger, got"
            f" {type(ledger).__name__}: {_checks.shown(ledger)}"
        )
    if not isinstance(getattr(mechanism, "sensitivity", None), Sensitivity):
        raise TypeError(
            "mechanism must be one that noise is drawn from, such as dpjax.laplace(sensitivity,"
            f" epsilon), got {type(mechanism).__name__}: {_checks.shown(mechanism)}"
        )
    sensitivity = mechanism.sensitivity
    sampled = sensitivity.records
    program = None if sampled is None else _same_program(target, sampled, sensitivity)
    check_maker(target, sensitivity)
    accepting = _accepting_values(mechanism)

    def inside_for(records: TreeSpec) -> Inside:
        return inside_of(target, covering(accepting, needed(target, sensitivity, records)))

    if not any(map(_checks.is_traced, jax.tree.leaves(mechanism))):
        inside_for = functools.cache(inside_for)

    @functools.cache  # Tracing a draw takes longer than drawing.
    def request_for(
        name: str | None, key: np.dtype, value: TreeSpec, fingerprint: str, records: TreeSpec
    ) -> Request | None:
        any_key = jax.ShapeDtypeStruct((), key)
        draw = inside_for(records).mechanism.unpaid_draw
        return request_of(name, draw, any_key, value, fingerprint, records, mechanism)

    compiled = set[tuple[np.dtype, Program, TreeSpec]]()

    def private(key: Key, database: Database, *, name: str | None = None) -> Release:
        check_key(key)
        records = released_records(target, database, sensitivity)
        spec = TreeSpec.of(records)
        inside = inside_for(spec)
        drawn = inside.mechanism
        traced = program or Program.trace("target", inside.target, spec.tree())
        if sensitivity.bounds is not None:
            _check_platform(records, convolves=traced.convolves)
        # What was traced just now is unchanged, but for code on the host.
        if program is not None or (traced.is_concrete and traced.calls_host):
            traced.check_unchanged("target")

        ahead = known_ahead(drawn, traced, key, records)

        def compile_once() -> None:
            if ahead is not None and (key.dtype, traced, spec) not in compiled:
                compile_ahead(ahead, traced, key, spec)
                compiled.add((key.dtype, traced, spec))

        def request(name: str | None) -> Request | None:
            if ahead is not None and name is None:
                return compile_once()
            return request_for(name, key.dtype, traced.outputs, traced.fingerprint, spec)

        def draw() -> Value:
            compile_once()
            if not traced.is_concrete:
                return drawn.unpaid_draw(key, apart(traced, records))
            with host_errors() if traced.calls_host else contextlib.nullcontext():
                return drawn.unpaid_draw(key, evaluate_alone(records, program=traced))

        release = pay_and_draw(
            draw,
            key,
            (mechanism, records, traced.jaxpr.consts),
            guarantee=guarantee_under(key, drawn.guarantee),
            what=getattr(target, "__name__", type(target).__name__),
            name=name,
            request=request,
            ledger=ledger,
            drawing=Drawing.of(drawn, traced.outputs),
        )
        accuracy = _accuracy(release, drawn, knowing(target) or target, traced.outputs, database)
        return dataclasses.replace(
            release, value=inside.published(release.value), accuracy=accuracy
        )

    return private


def as_released(target: Target, sensitivity: Sensitivity) -> Target:
    """The target as a release evaluates it: on clamped records, if its bound was proved so."""
    return target if sensitivity.bounds is None else sensitivity.bounds.enforced_on(target)


def _accuracy(
    release: Release, mechanism: Mechanism, target: object, outputs: TreeSpec, database: Database
) -> Accuracy:
    """How far a release may be off, if mechanism and target know it."""
    knows = getattr(mechanism, "accuracy", None)  # A mechanism of another library may not.
    accuracy = UNKNOWN if knows is None else knows(outputs)
    if isinstance(target, KnowsAccuracy):
        accuracy = target._accuracy_of(
            accuracy, mechanism.sensitivity.relation, release.value, database
        )
    return accuracy


def _accepting_values(mechanism: Mechanism) -> Mechanism:
    """The mechanism for values of clamped records, which only a program that clamps may make."""
    sensitivity = mechanism.sensitivity
    if sensitivity.bounds is None:
        return mechanism
    if sensitivity.records is None or sensitivity.target is None:
        raise ValueError("sensitivity must name the target whose records are clamped")
    return changed(mechanism, sensitivity=dataclasses.replace(sensitivity, bounds=None))


def _check_platform(records: Database, *, convolves: bool = False) -> None:
    """Refuses devices on which nobody bounds the rounding that a proof counts.

    Libraries of GPUs choose among algorithms of convolutions, and some add up other products.
    """
    arrays = [x for x in jax.tree.leaves(records) if not _checks.is_traced(x)]
    platforms = {device.platform for x in arrays for device in x.devices()}
    proved_on = _PROVED_ON & {"cpu"} if convolves else _PROVED_ON
    unknown = sorted((platforms or {jax.default_backend()}) - proved_on)
    if unknown:
        known = "CPUs alone, for a convolution" if convolves else "CPUs and GPUs"
        raise ValueError(
            f"a proved sensitivity counts the rounding of {known}, and the database is on"
            f" {', '.join(unknown)}: move it to one of them, as by jax.device_put"
        )


def _same_program(target: Target, records: TreeSpec, sensitivity: Sensitivity) -> Program:
    program = Program.trace("target", as_released(target, sensitivity), records.tree())
    if not program.is_concrete:
        raise TypeError(
            "target closes over a traced value, so it cannot be the one that was sampled: make the"
            " private function outside jit and vmap"
        )
    if program.fingerprint != sensitivity.target:
        raise ValueError(
            "target is not the one that was sampled: its traced program, a constant in it or JAX's"
            " configuration (float64, random numbers, disable_jit) differs"
            f" (fingerprint {program.fingerprint}, sampled {sensitivity.target}); sample the"
            " sensitivity of this target"
        )
    return program
