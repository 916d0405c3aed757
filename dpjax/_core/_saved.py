"""Releases and guarantees as JSON, and back: every bit of a number, and no guarantee unchecked."""

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, interval, is_kind
from dpjax._core._guarantee import Guarantee, NeighboringRelation, SampledEvent, concrete
from dpjax._core._types import PyTree, Value
from dpjax._version import __version__

FORMAT = 2  # Values of sums were integers in format 1.
_PARTS = ("format", "dpjax", "value", "guarantee", "accuracy", "interval")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PRINTED = 0.95


def saved(value: Value, guarantee: Guarantee, accuracy: Accuracy) -> dict[str, Any]:
    """A release as a dict that JSON can hold."""
    parts = {
        "format": FORMAT,
        "dpjax": __version__,
        "value": tree_to_json(value),
        "guarantee": guarantee_to_json(guarantee),
        "accuracy": {
            "kind": accuracy.kind,
            "public": accuracy.facts,
            "measured": tree_to_json(accuracy.measured),
        },
        "interval": _interval_to_json(value, accuracy),
    }
    return {**parts, "sha256": _digest(parts)}


def restored(saved: object) -> tuple[Value, Guarantee, Accuracy]:
    """The parts of a release; refuses a dict that another program changed, or a newer one made."""
    if not isinstance(saved, dict) or not {"format", "sha256"} <= saved.keys():
        raise ValueError(f"saved must be a dict by Release.to_dict, got {_checks.shown(saved)}")
    if saved["format"] != FORMAT:
        raise ValueError(
            f"saved was written in format {_checks.shown(saved['format'])} by dpjax"
            f" {_checks.shown(saved.get('dpjax'))}, and this is dpjax {__version__}, which reads"
            f" format {FORMAT}: install that version"
        )
    parts = {name: part for name, part in saved.items() if name != "sha256"}
    if set(parts) != set(_PARTS) or saved["sha256"] != _digest(parts):
        raise ValueError(
            "saved was changed after Release.to_dict made it, or lost a part: its guarantee cannot"
            " be believed"
        )
    try:
        about = parts["accuracy"]
        if not is_kind(about["kind"]):
            raise ValueError(f"accuracy is of the unknown kind {_checks.shown(about['kind'])}")
        return (
            tree_from_json(parts["value"]),
            guarantee_from_json(parts["guarantee"]),
            Accuracy.of(about["kind"], about["public"], tree_from_json(about["measured"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"saved holds no release: {error}") from error


def guarantee_to_json(guarantee: Guarantee) -> dict[str, Any]:
    """A guarantee with every digit."""
    known = concrete(guarantee)
    numbers = {name: _number_to_json(getattr(known, name)) for name in _NUMBERS}
    events = [
        (
            event.gamma,
            event.confidence,
            event.identity,
            *(() if event.records is None else (event.records,)),
        )
        for event in known.events
    ]
    parts = {**vars(known), **numbers, "events": events, "relation": known.relation.value}
    if known.replacing is None:
        del parts["replacing"]
    return parts


_NUMBERS = ("epsilon", "delta", "gamma", "confidence")


def guarantee_from_json(stored: dict[str, Any]) -> Guarantee:
    """A guarantee whose numbers were checked, also against those of its samplings."""
    epsilon, delta, gamma, confidence = (_number_from_json(stored[name]) for name in _NUMBERS)
    guarantee = Guarantee(
        epsilon,
        delta,
        gamma,
        confidence,
        tuple(SampledEvent(*event) for event in stored["events"]),
        NeighboringRelation(stored["relation"]),
        tuple(map(str, stored["notes"])),
        stored["group_size"],
        _replacing(stored.get("replacing")),
    )
    if any(event.gamma > guarantee.gamma for event in guarantee.events):
        raise ValueError("guarantee promises a smaller gamma than one of its samplings")
    return concrete(guarantee)


def _replacing(stored: Any) -> tuple[float, float, float, float] | None:
    if stored is None:
        return None
    first, second, third, fourth = map(float, stored)
    return first, second, third, fourth


def tree_to_json(tree: PyTree) -> Any:
    """A tree of dicts, lists and tuples as JSON; arrays with dtype and shape, texts by name."""
    if isinstance(tree, str):
        return {"text": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float)):
        return _number_to_json(tree)
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        _checks.host_only("to_dict", tree, "the release as it is")
        _check_real(tree.dtype)
        return _array_to_json(np.asarray(tree))
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: tree_to_json(part) for name, part in tree.items()}}
    for kind in (list, tuple):
        if type(tree) is kind:
            return {kind.__name__: [tree_to_json(part) for part in tree]}
    raise TypeError(
        "value must be made of arrays, numbers, texts, lists, tuples and dicts with names as keys,"
        f" to be saved as JSON, got {type(tree).__name__}: take its arrays by"
        " dpjax.accounting.post_process, or pickle the release"
    )


def tree_from_json(stored: Any) -> PyTree:
    """The tree again; arrays are JAX's where JAX has their dtype now, else NumPy's."""
    if not isinstance(stored, dict):
        return _number_from_json(stored)
    if "dtype" in stored:
        return _array_from_json(stored)
    ((kind, parts),) = stored.items()
    if kind == "text":
        return str(parts)
    if kind == "dict":
        return {str(name): tree_from_json(part) for name, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](map(tree_from_json, parts))


def _array_to_json(array: np.ndarray) -> dict[str, Any]:
    data = [_number_to_json(number) for number in array.ravel().tolist()]
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def _array_from_json(stored: dict[str, Any]) -> jax.Array | np.ndarray:
    dtype = jnp.dtype(stored["dtype"])
    _check_real(dtype)
    flat = [_number_from_json(number) for number in stored["data"]]
    array = np.array(flat, dtype).reshape(stored["shape"])
    return jnp.asarray(array) if jax.dtypes.canonicalize_dtype(dtype) == dtype else array


def _check_real(dtype: np.dtype) -> None:
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(f"value must hold real numbers, got an array of dtype {dtype}")


def _number_to_json(number: Any) -> Any:
    """A number as JSON has it, or the name of one that JSON lacks."""
    if not isinstance(number, float):
        return number
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else "Infinity" if number > 0 else "-Infinity"


def _number_from_json(stored: Any) -> Any:
    if isinstance(stored, str):
        return _NOT_FINITE[stored]
    if stored is None or isinstance(stored, (bool, int, float)):
        return stored
    raise TypeError(f"expected a number, got {_checks.shown(stored)}")


def _interval_to_json(value: Value, accuracy: Accuracy) -> Any:
    """The interval for readers in other languages; it is not read back, but made again."""
    try:
        low, high = interval(value, accuracy, _PRINTED, simultaneous=False)
    except ValueError:
        return None
    low, high = (tree_to_json(jax.tree.map(np.asarray, end)) for end in (low, high))
    return {"confidence": _PRINTED, "low": low, "high": high}


def _digest(parts: dict[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
