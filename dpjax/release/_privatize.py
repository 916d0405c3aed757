"""`privatize`: makes a private function of a database from a target and a mechanism.

The database is converted to the dtypes that the target expects. The conversion depends only on the
target and on the dtypes of the columns. It never depends on the numbers in the columns, because
these are private. docs/how-to/pandas.md explains the rules to users.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._accuracy import KnowsAccuracy
from dpjax._core._columns import Numbers, is_numbers
from dpjax._core._frames import place_of
from dpjax._core._guarantee import RECORD
from dpjax._core._open_ledgers import Drawing, OpenLedger, Request
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._records import AddsUp, Parts, Unsummed, as_dtype, check_padded, exact_records
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import (
    Inside,
    KnowsSensitivity,
    Mechanism,
    NeighboringRelation,
    Release,
    Sensitivity,
    Target,
)
from dpjax._tracing._contents import contents_of, functions_of_the_user
from dpjax._tracing._host_calls import host_errors
from dpjax._tracing._programs import Program, Unchanging, apart, check_concrete, evaluate_alone
from dpjax.proving._operations import runs_on_cpu_only
from dpjax.random._keys import check_key
from dpjax.release._draw import Draw, DrawOfAnother, can_compile_ahead, compile_ahead, draw_of
from dpjax.release._known_sensitivity import check_maker, covering, knowing, needed, plan_of
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.release._transaction import pay_and_draw, request_of

_KINDS = (jnp.floating, jnp.signedinteger, jnp.unsignedinteger, jnp.bool_)


def released_records(target: Target, database: Database, sensitivity: Sensitivity) -> Database:
    """Converts a database to the records that the target expects.

    Whether this raises an error depends only on the structure, shapes and dtypes of the database,
    not on its values.
    """
    known = knowing(target)
    # Neighboring databases may differ in their number of rows if a record is added or removed, or
    # if people have different numbers of rows. Then padding must hide the number of rows.
    of_people = known is not None and known.privacy_unit != RECORD
    added = sensitivity.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if (added or of_people) and sensitivity.n is None:
        check_padded(database)
    records, n = exact_records("database", database)
    if sensitivity.n is not None and n != sensitivity.n:
        raise ValueError(
            f"database must have n={sensitivity.n} records, the number for which the sensitivity"
            f" was made, got {n}"
        )
    if sensitivity.records is not None:
        return _as_sampled(records, sensitivity.records)
    reads = "arrays" if known is None else known.reads
    if reads == "numbers":
        return records

    def array(path: tuple[object, ...], leaf: jax.Array | Numbers) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer) and isinstance(leaf, Numbers):
            if reads == "arrays":
                raise TypeError(_beyond(path, leaf))
            dtype = jnp.result_type(float) if reads == "floats" else dtype
        return as_dtype(leaf, dtype)

    return jax.tree_util.tree_map_with_path(array, records, is_leaf=is_numbers)


def _beyond(path: tuple[object, ...], leaf: Numbers) -> str:
    return (
        f"{place_of('database', path)} must have a dtype that JAX has without x64, got"
        f" {leaf.dtype}: your function would get int32, with larger numbers clamped to its range."
        ' Pass floats, by .astype("float64"), or integers within public bounds, by .clip(low,'
        ' high).astype("int32"), or leave the column out. Queries of dpjax accept all dtypes'
    )


def _as_sampled(records: Database, sampled: TreeSpec) -> Database:
    """Converts records to the dtypes of the oracle's databases, clamped to each dtype's range."""
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        records,
        is_leaf=is_numbers,
    )
    got = TreeSpec.of(arrays)
    if got.form != sampled.form:
        raise ValueError(
            f"database must have the structure and shapes of the oracle's databases, {sampled}, got"
            f" {got}"
        )

    def cast(sampled: jax.ShapeDtypeStruct, leaf: jax.Array | Numbers) -> jax.Array:
        integers = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)
        whole_as_float = integers and jnp.issubdtype(sampled.dtype, jnp.floating)
        if not whole_as_float and _kind(leaf) != _kind(sampled):
            raise TypeError(
                f"database must contain an array of shape {sampled.shape} with dtype "
                f"{sampled.dtype}, as the oracle's databases do, got dtype {leaf.dtype}"
            )
        return as_dtype(leaf, sampled.dtype)

    return jax.tree.map(cast, sampled.tree(), records)


def _kind(leaf: PyTree) -> list[bool]:
    return [jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS]


# Platforms whose rounding errors a proof covers. XLA's own tests allow errors of 40 units in the
# last place in exp, log, tanh and other functions on these platforms, and far larger ones on a TPU.
_PROVED_ON = frozenset(("cpu", "gpu", "cuda", "rocm"))
_MOST_KEPT = 256  # The largest number of entries in the cache of a private function.


class _Kind(NamedTuple):
    """What is known about all databases that have the same structure, shapes and dtypes.

    Attributes:
        records: the structure, shapes and dtypes.
        shapes: the same, as a pytree of `jax.ShapeDtypeStruct`.
        plan: how such databases are released.
    """

    records: TreeSpec
    shapes: Database
    plan: Inside


class _Step(NamedTuple):
    """The inputs of one release: key, records, the target's program, and the mechanism's draw."""

    key: Key
    records: Database | Unsummed
    kind: _Kind
    program: Program
    draw: Draw | DrawOfAnother


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrivateFunction:
    """A private version of a target; made by `dpjax.privatize`.

    Attributes:
        target: the function of the database.
        mechanism: the mechanism that releases its value.
        ledger: a ledger that pays, besides open ledgers; None if there is no such ledger.

    Formal guarantees:
        As for `dpjax.privatize`.
    """

    target: Target
    mechanism: Mechanism
    ledger: OpenLedger | None
    _program: Program | None  # The traced target, if its sensitivity was sampled or proved.
    _accepting: Mechanism  # The mechanism without the check that records were clamped.
    # A cache of results of earlier releases. The first entry of each key says what is cached:
    # "kind" (of databases), "users" (the functions in the target that the user wrote), "target",
    # "request", or "compiled".
    _kept: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False)

    @functools.cached_property
    def _name(self) -> str:
        return getattr(self.target, "__name__", type(self.target).__name__)

    @functools.cached_property
    def _knows_accuracy(self) -> KnowsAccuracy | None:
        known = knowing(self.target) or self.target
        return known if isinstance(known, KnowsAccuracy) else None

    @functools.cached_property
    def _keeps(self) -> bool:
        """Whether results may be cached.

        Results that contain tracers must not be cached, because tracers are invalid after tracing.
        """
        return not _checks.any_traced(self.mechanism)

    def __repr__(self) -> str:
        return f"PrivateFunction({self._name}, {self.mechanism!r})"

    def __call__(self, key: Key, database: Database, *, name: str | None = None) -> Release:
        """Releases the value of the target on a database.

        Args:
            key: a typed key from `dpjax.random.secure_key`, used for nothing else.
            database: a pytree of arrays with leading axis n, or a table.
            name: a public name of these records, for a ledger.

        Returns:
            A `Release`.

        Raises:
            TypeError: as for `dpjax.privatize`.
            ValueError: as for `dpjax.privatize`.
        """
        check_key(key)
        records, kind = self._read(database)
        mechanism = kind.plan.mechanism
        program = self._traced(kind)
        if self.mechanism.sensitivity.bounds is not None:
            _check_platform(records, convolves=runs_on_cpu_only(program.jaxpr.jaxpr))
        make = draw_of if isinstance(mechanism, SensitivityMechanism) else DrawOfAnother
        draw = make(mechanism, program.outputs)
        step = _Step(key, records, kind, program, draw)
        release = pay_and_draw(
            lambda: self._drawn(step),
            key,
            (self.mechanism, records, program.jaxpr.consts),
            guarantee=draw.promised(mechanism, key),
            what=self._name,
            name=name,
            request=lambda name: self._request(step, name),
            ledger=self.ledger,
            drawing=Drawing.of(mechanism, program.outputs),
            exact=lambda: (kind.plan, program(_summed(records))),
        )
        accuracy = draw.accuracy(mechanism)
        if (knows := self._knows_accuracy) is not None:
            relation = mechanism.sensitivity.relation
            accuracy = knows._accuracy_of(accuracy, relation, release.value, database)
        published = kind.plan.published
        value = release.value if published is None else published(release.value)
        return Release(value, release.guarantee, accuracy)

    def _read(self, database: Database | Parts) -> tuple[Database | Unsummed, _Kind]:
        """Returns the records that are passed to the target, and their kind.

        Errors and conversions depend only on structure, shapes and dtypes. So if arrays with given
        shapes and dtypes needed no conversion, later arrays with the same shapes and dtypes are
        returned unchanged.
        """
        if isinstance(database, Parts):
            return self._read_parts(database)
        leaves, structure = jax.tree.flatten(database)
        looks: Hashable = None
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            kinds = tuple((x.shape, x.dtype, getattr(x, "weak_type", None)) for x in leaves)
            looks = structure, kinds, jax.config.jax_enable_x64  # pyright: ignore
            if (kind := self._kept.get(("kind", looks))) is not None:
                return database, kind
        records = released_records(self.target, database, self.mechanism.sensitivity)
        described = TreeSpec.of(records)
        # x64 is part of the key, because without x64, a known sensitivity is rounded outward to
        # float32.
        alike = "kind", described, jax.config.jax_enable_x64  # pyright: ignore
        if (kind := self._kept.get(alike)) is None:
            kind = self._kind_of(described)
            self._keep(alike, kind)
        arrays, read_as = jax.tree.flatten(records)
        if looks and read_as == structure and all(map(operator.is_, arrays, leaves)):
            self._keep(("kind", looks), kind)
        return records, kind

    def _read_parts(self, parts: Parts) -> tuple[Unsummed, _Kind]:
        """Returns the computation of the parts' totals, and the kind of these totals.

        The computation runs only after a ledger has paid.
        """
        sensitivity, target = self.mechanism.sensitivity, knowing(self.target)
        if not isinstance(target, AddsUp) or sensitivity.records is not None:
            raise TypeError(
                "target must be a query of dpjax if the database comes in parts, because only "
                f"queries can add up totals of parts, got {self._name}"
            )
        parts.check(sensitivity.relation, sensitivity.privacy_unit)
        totals = target.over(parts)
        return totals, self._kind_of(TreeSpec.of(totals.shapes))

    def _keep(self, key: Hashable, value: object) -> None:
        if self._keeps:
            if len(self._kept) >= _MOST_KEPT:
                # Another thread may still look up a key. This is safe, because every look-up
                # handles missing keys.
                self._kept.clear()
            self._kept[key] = value

    def _kind_of(self, records: TreeSpec) -> _Kind:
        """Returns how records of this structure are released.

        It raises an error if the noise of the mechanism is too small for the target.
        """
        least = needed(self.target, self.mechanism.sensitivity, records)
        plan = plan_of(self.target, covering(self._accepting, least))
        return _Kind(records, records.tree(), plan)

    def _traced(self, kind: _Kind) -> Program:
        """Returns the target's current program, traced again if the target may have changed."""
        if self._program is not None:
            self._program.check_unchanged("target")
            return self._program
        target = kind.plan.target
        if isinstance(target, KnowsSensitivity):
            target = self._unchanging(kind.plan.target)
        program = Program.trace("target", target, kind.shapes)
        # The target was traced just now, so the trace contains all changes of traced code. Code
        # that runs on the host was copied earlier, so check that this code has not changed since
        # then.
        if program.is_concrete and program.calls_host:
            program.check_unchanged("target")
        return program

    def _unchanging(self, target: Target) -> Target:
        """Returns the target with cached programs, or the target itself if parts of it may change.

        Objects of dpjax are immutable. But they may contain a user's predicate that closes over a
        variable, which may have changed since the predicate was traced. In this case the target
        itself is returned, so that it is traced again.
        """
        users = self._kept.get(("users", target), "unknown")
        if users == "unknown":
            users = functions_of_the_user(target)
            self._keep(("users", target), users)
        contents = None if users is None else tuple(map(contents_of, users))
        if contents is None or None in contents:
            return target
        if (kept := self._kept.get(("target", target, contents))) is None:
            kept = Unchanging("target", target)
            self._keep(("target", target, contents), kept)
        return kept

    def _request(self, step: _Step, name: str | None) -> Request | None:
        """Returns the request that a ledger stores under `name`; None without a name.

        With or without a name, this traces or compiles the draw. So errors of the draw are raised
        here, before anything is paid.
        """
        if name is None and self._compiled_ahead(step):
            return None
        program, kind = step.program, step.kind
        asked = "request", name, step.key.dtype, program.outputs, program.fingerprint, kind.records
        # If the mechanism contains a user's function, this function may have changed since the
        # request was cached. Then the request must be computed again.
        may_change = getattr(self.mechanism, "_calls_user", True)
        if not may_change and (known := self._kept.get(asked)) is not None:
            return known[0]
        any_key = jax.ShapeDtypeStruct((), step.key.dtype)
        about = program.outputs, program.fingerprint, kind.records, self.mechanism
        found = request_of(name, step.draw.outline, any_key, *about)
        self._keep(asked, (found,))
        return found

    def _compiled_ahead(self, step: _Step) -> bool:
        """Compiles the programs of a release before it is paid for.

        Returns whether the programs could be compiled. If not, they are compiled when they run.
        """
        if not step.program.is_concrete:
            return False
        programs = "compiled", step.key.dtype, step.program, step.kind.records
        if programs in self._kept:
            return True
        arrays = [] if isinstance(step.records, Unsummed) else jax.tree.leaves(step.records)
        draw, used = step.draw, [step.key, *arrays]
        if not isinstance(draw, Draw) or not can_compile_ahead(draw, step.program, used):
            return False
        compile_ahead(draw, step.kind.plan.mechanism, step.program, step.key, step.kind.records)
        self._keep(programs, True)
        return True

    def _drawn(self, step: _Step) -> Value:
        """Computes the target in a program of its own, and adds noise to the result."""
        self._compiled_ahead(step)
        program, key, records = step.program, step.key, _summed(step.records)
        if not program.is_concrete:
            return step.draw(key, apart(program, records))
        with host_errors() if program.calls_host else contextlib.nullcontext():
            return step.draw(key, evaluate_alone(records, program=program))


def _summed(records: Database | Unsummed) -> Database:
    return records.compute() if isinstance(records, Unsummed) else records


def privatize(
    target: Target, mechanism: Mechanism, *, ledger: OpenLedger | None = None
) -> PrivateFunction:
    """Makes a private version of a target: `private(key, database, *, name=None) -> Release`.

    The private function computes f(D) and releases it. This is the last step of Algorithm 2
    (Sample-Then-Respond).

    Args:
        target: the function that was sampled.
        mechanism: a mechanism that is calibrated to the target's sensitivity, for example
            `dpjax.laplace(sensitivity, epsilon)`. If the target has a method `sensitivity`, as
            queries have, the mechanism's sensitivity must be at least the known sensitivity.
        ledger: a `dpjax.Ledger`, whose budget pays for every release before its noise is drawn, or
            a `dpjax.random.KeyLedger`. It need not be open. With a ledger, releases cannot run
            inside of `jit`.

    Returns:
        A `PrivateFunction` of a typed key and a database. The database is a pytree of arrays with
        leading axis n, and a DataFrame counts as the dict of its columns. Without x64, a query
        reads 64-bit columns exactly. A sampled function reads them in the oracle's dtype, clamped
        to its range. `jax.jit` can compile the private function, and `jax.vmap` can map it over
        keys.

        `name` is a public name of these records, such as a column or a group. If a `dpjax.Ledger`
        has paid for a release under a name, it returns this release again for the same request,
        with any key, free of charge. Without a name, every release is drawn again and paid for.
        Without a ledger, the name has no effect.

    Raises:
        TypeError: if an argument is of the wrong type; at a release, if the key is not a typed key,
            the name is not a string, the database does not consist of arrays of the kinds that were
            sampled, or it contains 64-bit integers without x64 and the target is a function with an
            assumed sensitivity.
        ValueError: if the target is not the one that was sampled (the traced programs and their
            constants are compared), or the sensitivity was computed by another query or target; at
            a release, if the sensitivity is smaller than the known sensitivity, the database has
            another size or structure, its size is private and it is not padded, or the ledger has
            recorded the key before.
        BudgetExceededError: at a release, if the remaining budget of the ledger is too small.
        LedgerError: at a release, if the ledger cannot be trusted or cannot be written.

    Formal guarantees:
        Each release has the guarantee `mechanism.guarantee`. If the sensitivity was sampled, this
        assumes that the database is a draw from the same oracle, and that you chose the target
        without looking at the database.

        Whether a release happens never depends on the numbers in the database. It depends on the
        structure, dtypes and size of the database, which count as public. So specify the dtypes
        when you read a file, instead of inferring them from its contents. Under add-or-remove-one
        the size is private. Then the database must be `dpjax.queries.PaddedRecords`, unless the
        sensitivity has an n, the number of slots.

        If you assumed the sensitivity, you promise that it bounds this target on databases of this
        size. If the target knows its own sensitivity, the assumed sensitivity is compared with it.
        A traced sensitivity that is too small gives NaN. A sampled sensitivity may be smaller than
        the known sensitivity, because gamma bounds how often it is exceeded. You also promise that
        two releases under the same name are about the same records, because a ledger does not
        compare records. Choose names without looking at records.

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
            "mechanism must be a mechanism, such as dpjax.laplace(sensitivity, epsilon), got"
            f" {type(mechanism).__name__}: {_checks.shown(mechanism)}"
        )
    sensitivity = mechanism.sensitivity
    sampled = sensitivity.records
    program = None if sampled is None else _same_program(target, sampled, sensitivity)
    check_maker(target, sensitivity)
    return PrivateFunction(target, mechanism, ledger, program, accepting_values(mechanism))


def as_released(target: Target, sensitivity: Sensitivity) -> Target:
    """Returns the target, with records clamped first if a proof assumes clamped records."""
    return target if sensitivity.bounds is None else sensitivity.bounds.enforced_on(target)


def accepting_values(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism without its check that records were clamped: the target clamps them."""
    sensitivity = mechanism.sensitivity
    if sensitivity.bounds is None:
        return mechanism
    if sensitivity.records is None or sensitivity.target is None:
        raise ValueError(
            "sensitivity was proved for clamped records, so it must contain the fingerprint of its "
            "target, got no fingerprint: make the sensitivity by dpjax.prove_sensitivity"
        )
    return changed(mechanism, sensitivity=dataclasses.replace(sensitivity, bounds=None))


def _check_platform(records: Database, *, convolves: bool = False) -> None:
    """Refuses records on devices whose rounding errors may exceed those that a proof allows.

    For convolutions, all GPUs are refused: their libraries may choose an algorithm, such as
    Winograd's, whose rounding errors are larger than those in the proof.
    """
    arrays = [x for x in jax.tree.leaves(records) if not _checks.is_traced(x)]
    platforms = {device.platform for x in arrays for device in x.devices()}
    proved_on = _PROVED_ON & {"cpu"} if convolves else _PROVED_ON
    unknown = sorted((platforms or {jax.default_backend()}) - proved_on)
    if unknown:
        known = "CPUs, for a target with a convolution" if convolves else "CPUs and GPUs"
        raise ValueError(
            f"a proved sensitivity is valid only on {known}, because other devices may have larger"
            f" rounding errors, but the database is on {', '.join(unknown)}: move the database to"
            " another device, for example by jax.device_put"
        )


def _same_program(target: Target, records: TreeSpec, sensitivity: Sensitivity) -> Program:
    program = Program.trace("target", as_released(target, sensitivity), records.tree())
    check_concrete("target", "call privatize", program)
    if program.fingerprint != sensitivity.target:
        raise ValueError(
            "target must be the target that was sampled or proved, but its traced program, a "
            "constant in it or JAX's configuration (float64, random numbers, disable_jit) differs "
            f"(fingerprint {program.fingerprint}, expected {sensitivity.target}): sample or prove "
            "the sensitivity of this target"
        )
    return program
