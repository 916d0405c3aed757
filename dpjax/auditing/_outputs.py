"""Draws outputs of a mechanism in batches of bounded memory, and computes their features."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, Value
from dpjax._core._values import Release

# Stands for the lowest set bit of 0, which is a multiple of every power of two.
NO_BIT = 4000
# Stands for the lowest set bit of NaN, of infinities, and of differences that were rounded.
NO_NUMBER = -4000
# The results of `binade` for 0, and for NaN and infinities.
_OF_ZERO, _OF_NO_NUMBER = -1075, 1024


def exact_numbers(column: np.ndarray) -> np.ndarray:
    """Converts numbers to a dtype of 32 or 64 bits. No number is rounded."""
    if column.dtype == bool or np.issubdtype(column.dtype, np.integer):
        return column.astype(np.int64)  # This preserves the bits of uint64.
    # Narrower floats, including bfloat16 and float8, are converted to float32.
    return column if column.dtype.itemsize in (4, 8) else column.astype(np.float32)


def lowest_set_bit(numbers: np.ndarray) -> np.ndarray:
    """Returns the largest j such that a number is a multiple of 2^j."""
    if numbers.dtype == np.int64:
        return np.where(numbers == 0, NO_BIT, _trailing_zeros(numbers))
    # Every float32 is exact in float64, and frexp is exact. A significand times 2^53 is an integer.
    finite = np.isfinite(numbers)
    significand, exponent = np.frexp(np.where(finite, numbers, 0).astype(np.float64))
    lowest = exponent - 53 + _trailing_zeros((significand * 2.0**53).astype(np.int64))
    return np.where(finite, np.where(numbers == 0, NO_BIT, lowest), NO_NUMBER)


def binade(numbers: np.ndarray) -> np.ndarray:
    """Returns the exponent j with 2^j <= |number| < 2^(j+1)."""
    found = np.frexp(numbers.astype(np.float64))[1] - 1
    found = np.where(numbers == 0, _OF_ZERO, found)
    return np.where(np.isfinite(numbers), found, _OF_NO_NUMBER)


def low_bits(numbers: np.ndarray, count: int) -> np.ndarray:
    """Returns the last bits of the significand of a float, or of an integer."""
    word = np.uint32 if numbers.dtype.itemsize == 4 else np.uint64
    return (numbers.view(word) & word(2**count - 1)).astype(np.int64)


def lowest_set_bit_of_difference(numbers: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns the lowest set bit of number - value; `NO_NUMBER` if the difference is rounded.

    If the mechanism added value and noise without rounding, the difference is exact, too, and
    equals the noise.
    """
    if numbers.dtype == np.int64:
        return lowest_set_bit(numbers - value)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = numbers - value
        # This computes the exact rounding error of the subtraction (Knuth's two-sum).
        back = difference - numbers
        error = (numbers - (difference - back)) - (value + back)
    return np.where(error == 0, lowest_set_bit(difference), NO_NUMBER)


def _trailing_zeros(numbers: np.ndarray) -> np.ndarray:
    """Returns the number of trailing zero bits of each integer; a meaningless number for 0."""
    words = numbers.view(np.uint64)
    # This isolates the lowest set bit, which is a power of two, so a float represents it exactly.
    return np.frexp((words & (~words + np.uint64(1))).astype(float))[1].astype(np.int64) - 1


# A coordinate is divided into bins twice: into few wide bins, and into many narrow bins. With at
# most `_FEW` distinct values it needs no bins.
BINS = (64, 1024)
_FEW = 256
_LOW_BITS = 8
# A grid contains nearly all numbers of a coordinate. At most this fraction of the numbers may be
# off the grid.
_STRAYS = 0.02


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """Maps every output of a batch to an integer code, and describes each code in words."""

    name: str
    encode: Callable[[Value], np.ndarray]
    label: Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """One number of an output, given by the index of its leaf and the index in that leaf."""

    leaf: int
    index: int
    name: str

    def __call__(self, outputs: Value) -> np.ndarray:
        """Returns this coordinate of every output in a batch."""
        return matrices(outputs)[self.leaf][:, self.index]


def matrices(outputs: Value) -> list[np.ndarray]:
    """Reshapes the arrays of a batch of outputs to (outputs, numbers)."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(outputs)]
    return [leaf.reshape(len(leaf), -1) for leaf in leaves]


def coordinates(here: Value, scores: list[np.ndarray], count: int) -> list[Coordinate]:
    """Returns the `count` coordinates of an output that have the highest scores."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(here)]
    ends = np.cumsum([len(score) for score in scores])
    chosen: list[Coordinate] = []
    for position in np.argsort(-np.concatenate(scores), kind="stable")[:count]:
        leaf = int(np.searchsorted(ends, position, side="right"))
        index = int(position - (ends[leaf - 1] if leaf else 0))
        shape = np.shape(jax.tree.leaves(here)[leaf])[1:]
        inside = "".join(f"[{i}]" for i in np.unravel_index(index, shape)) if shape else ""
        chosen.append(Coordinate(leaf, index, f"output{jax.tree_util.keystr(paths[leaf])}{inside}"))
    return chosen


def whole_output(here: Value, there: Value) -> Code:
    """Returns the code that maps an output to a hash of all of its bits.

    The outputs in `here` and `there` are used only to label codes.
    """

    def show(outputs: Value, row: int) -> str:
        leaves = [np.asarray(leaf[row]) for leaf in jax.tree.leaves(outputs)]
        texts = [np.array2string(leaf, precision=6, threshold=6) for leaf in leaves]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    seen = _seen(_fingerprints, show, here, there)
    return Code(
        "output", _fingerprints, lambda code: seen.get(code, f"the output with hash {code}")
    )


def _seen(
    encode: Callable[[Value], np.ndarray], show: Callable[[Value, int], str], *batches: Value
) -> dict[int, str]:
    """Returns a dict from each code in the batches to the text of one output with this code.

    A batch with too many codes is left out.
    """
    seen: dict[int, str] = {}
    for outputs in batches:
        codes, rows = np.unique(encode(outputs), return_index=True)
        if len(codes) <= _FEW:
            seen |= {int(c): show(outputs, int(row)) for c, row in zip(codes, rows, strict=True)}
    return seen


def exact_value(coordinate: Coordinate, here: Value, there: Value) -> Code:
    """Returns a code that maps each exact value of a number to an integer of its own.

    It suits a number that takes few values.
    """

    def encode(outputs: Value) -> np.ndarray:
        return _bits_of(coordinate(outputs))

    seen = _seen(encode, lambda outputs, row: f"{coordinate(outputs)[row]}", here, there)
    return Code(coordinate.name, encode, seen.__getitem__)


def bins(coordinate: Coordinate, here: Value, there: Value, count: int) -> Code:
    """Returns the code that maps a number to the index of its interval.

    There are at most `count` intervals, which are about equally likely.
    """
    both = np.concatenate([coordinate(here), coordinate(there)]).astype(float)
    edges = np.unique(np.nanquantile(both, np.arange(1, count) / count, method="lower"))
    ends = np.concatenate([[-np.inf], edges, [np.inf]])

    return Code(
        coordinate.name,
        lambda outputs: np.searchsorted(edges, coordinate(outputs).astype(float), side="right"),
        lambda code: f"[{ends[code]:.6g}, {ends[code + 1]:.6g})",
    )


def grain_and_binade(coordinate: Coordinate) -> Code:
    """Returns a code of a number's lowest set bit and its magnitude."""

    def parts(outputs: Value) -> Sequence[np.ndarray]:
        numbers = exact_numbers(coordinate(outputs))
        return lowest_set_bit(numbers), binade(numbers)

    name = f"(lowest set bit, magnitude) of {coordinate.name}"
    return _of_two(name, parts, lambda lowest, size: f"({_power(lowest)}, 2^{size})")


def low_bits_and_binade(coordinate: Coordinate) -> Code:
    """Returns a code of a number's sign, magnitude and lowest bits.

    The lowest bits may show how the number was computed.
    """

    def parts(outputs: Value) -> Sequence[np.ndarray]:
        numbers = exact_numbers(coordinate(outputs))
        return 2 * low_bits(numbers, _LOW_BITS) + np.signbit(numbers), binade(numbers)

    def label(signed: int, size: int) -> str:
        return f"({'-' if signed % 2 else '+'}, {signed // 2:0{_LOW_BITS}b}, 2^{size})"

    return _of_two(f"(sign, low bits, magnitude) of {coordinate.name}", parts, label)


def grains_of_differences(coordinate: Coordinate, value: np.number, neighbor: np.number) -> Code:
    """Returns a code of the lowest set bits of output - value and output - neighbor.

    A difference that is not exact has a separate code.
    """
    name = coordinate.name
    return _of_two(
        f"lowest set bits of ({name} - value, {name} - neighbor)",
        lambda outputs: _grains_from(coordinate, outputs, value, neighbor),
        lambda first, second: f"({_power(first)}, {_power(second)})",
    )


def _of_two(
    name: str, parts: Callable[[Value], Sequence[np.ndarray]], label: Callable[[int, int], str]
) -> Code:
    """Returns a code that contains two integers. The second one has at most 16 bits."""

    def encode(outputs: Value) -> np.ndarray:
        high, low = parts(outputs)
        return (high.astype(np.int64) << 16) + (low.astype(np.int64) + 2**15)

    return Code(name, encode, lambda code: label(code >> 16, (code & (2**16 - 1)) - 2**15))


def off_the_grid(
    coordinate: Coordinate, here: Value, there: Value, ends: Sequence[np.number] | None
) -> Code:
    """Returns the code that tells whether a number is on the grid that contains most numbers.

    The code is 0 on the grid. Off the grid, it tells whether number - value and number - neighbor
    can be computed without rounding.
    """
    found = [grain(coordinate)(outputs) for outputs in (here, there)]
    exponent = float(np.nanquantile(np.concatenate(found), _STRAYS, method="lower"))

    def encode(outputs: Value) -> np.ndarray:
        off = grain(coordinate)(outputs) < exponent
        if ends is None:
            return off.astype(np.int64)
        reached = [x != NO_NUMBER for x in _grains_from(coordinate, outputs, *ends)]
        return np.where(off, 1 + 2 * reached[0] + reached[1], 0)

    def label(code: int) -> str:
        if code == 0:
            return "on it"
        return f"off it{', from ' * (code > 1)}{['', 'neighbor', 'value', 'both'][code - 1]}"

    return Code(f"{coordinate.name} and the grid of 2^{exponent:.0f}", encode, label)


def _grains_from(coordinate: Coordinate, outputs: Value, *ends: np.number) -> list[np.ndarray]:
    """Returns, for each of the `ends`, the lowest set bit of the difference output - end."""
    numbers = exact_numbers(coordinate(outputs))
    with np.errstate(over="ignore", invalid="ignore"):  # NaN is cast to an arbitrary integer.
        values = [exact_numbers(np.asarray([x])).astype(numbers.dtype) for x in ends]
    return [lowest_set_bit_of_difference(numbers, x) for x in values]


def grain(coordinate: Coordinate) -> Callable[[Value], np.ndarray]:
    """Returns a function that computes `lowest_set_bit` of a coordinate, as floats.

    The result is NaN for NaN and infinities.
    """

    def evaluate(outputs: Value) -> np.ndarray:
        lowest = lowest_set_bit(exact_numbers(coordinate(outputs)))
        return np.where(lowest == NO_NUMBER, np.nan, lowest)

    return evaluate


def takes_few_values(coordinate: Coordinate, here: Value, there: Value) -> bool:
    """Whether a number takes so few values that it needs no bins."""
    both = np.concatenate([coordinate(here), coordinate(there)])
    return len(np.unique(_bits_of(both))) <= _FEW


def _bits_of(numbers: np.ndarray) -> np.ndarray:
    return _words(numbers).view(np.int64)


def _words(matrix: np.ndarray) -> np.ndarray:
    """Converts the bits of every number to a 64-bit word."""
    unsigned = np.dtype(f"u{matrix.dtype.itemsize}")
    return np.ascontiguousarray(matrix).view(unsigned).astype(np.uint64)


def _fingerprints(outputs: Value) -> np.ndarray:
    """Returns a 64-bit hash of every output. Outputs of a single number have no collisions."""
    words = np.concatenate([_words(matrix) for matrix in matrices(outputs)], axis=1)
    # Multiplication by an odd number modulo 2^64 is one-to-one, so outputs of a single number have
    # no collisions.
    odd = np.random.default_rng(0).integers(2**63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    return (words * odd).sum(axis=1, dtype=np.uint64).view(np.int64)


def _power(lowest: int) -> str:
    return {NO_BIT: "zero", NO_NUMBER: "none"}.get(lowest, f"2^{lowest}")


# There are only a few batch sizes, so that audits with different numbers of samples share compiled
# programs.
_BATCHES = (2**10, 2**14, 2**17)
# The largest number of floats or integers in one batch. The limit also holds for two samples.
# Events are learned from one sample, and the other determines which of these events are tested.
_MOST_NUMBERS = 2**24


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """How many outputs of each value are used for each purpose. Each output has one purpose."""

    batch: int  # The number of outputs of one call of the compiled program.
    # The number of outputs from which possible events are learned. A second sample of this size
    # determines which of these events are tested.
    learning: int
    bounding: int  # The number of outputs that bound the probabilities of the chosen events.


class Sampler:
    """Runs `mechanism(key, value)`, which returns a release or a pytree of arrays, on many keys."""

    def __init__(self, mechanism: Callable[[Key, Value], Release | Value], jit: bool) -> None:
        """Stores a mechanism, which is compiled at its first use if `jit` is true."""
        self.mechanism = mechanism
        # The program closes over the mechanism, whose parameters are then concrete. So noise is
        # drawn in the same way as outside of `jit`.
        compiled = jax.jit(self._trace_outputs, static_argnames="size")
        self._outputs = compiled if jit else self._trace_outputs
        self._log_ratios = jax.jit(self._trace_log_ratios)

    def plan(self, key: Key, value: Value, neighbor: Value, samples: int) -> SamplePlan:
        """Divides the samples among their purposes. Refuses outputs that cannot be compared."""
        output, other = (jax.eval_shape(self._release, key, x) for x in (value, neighbor))
        if TreeSpec.of(output) != TreeSpec.of(other):
            raise ValueError(
                "mechanism must give outputs of one shape and dtype for value and neighbor, got"
                f" {TreeSpec.of(output)} and {TreeSpec.of(other)}"
            )
        arrays = jax.tree.leaves(_checks.real_shapes("the output of mechanism", output))
        most = max(1, _MOST_NUMBERS // sum(array.size for array in arrays))
        learning = min(samples // 4, most)
        fitting = [size for size in _BATCHES if size <= min(learning, most)]
        return SamplePlan(
            max(fitting, default=min(_BATCHES[0], most)), learning, samples - 2 * learning
        )

    def batches(self, key: Key, value: Value, count: int, size: int) -> Iterator[Value]:
        """Draws outputs under independent keys, as NumPy arrays with a leading axis."""
        for i, batch_key in enumerate(jax.random.split(key, math.ceil(count / size))):
            outputs = jax.device_get(self._outputs(batch_key, value, size=size))
            yield rows_of(outputs, slice(count - i * size))

    def draw(self, key: Key, value: Value, count: int, size: int) -> Value:
        """Draws the same outputs as `batches`, joined to one batch."""
        return joined(list(self.batches(key, value, count, size)))

    def log_ratios(self, outputs: Value, value: Value, neighbor: Value, size: int) -> np.ndarray:
        """Returns the log likelihood of every output under value, minus that under neighbor."""
        return in_batches(lambda batch: self._log_ratios(batch, value, neighbor), outputs, size)

    def _release(self, key: Key, value: Value) -> Value:
        output = self.mechanism(key, value)
        output = output.value if isinstance(output, Release) else output
        return jax.tree.map(jnp.asarray, output)

    def _trace_outputs(self, key: Key, value: Value, size: int) -> Value:
        return jax.vmap(self._release, in_axes=(0, None))(jax.random.split(key, size), value)

    def _trace_log_ratios(self, outputs: Value, value: Value, neighbor: Value) -> jax.Array:
        log_prob = jax.vmap(getattr(self.mechanism, "log_prob"), in_axes=(0, None))  # noqa: B009
        return log_prob(outputs, value) - log_prob(outputs, neighbor)


def rows_of(batch: Value, rows: int | slice | np.ndarray) -> Value:
    """Returns the given rows, or one row, of a batch of outputs."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)


def in_batches(function: Callable[[Value], jax.Array], outputs: Value, size: int) -> np.ndarray:
    """Returns the number that a compiled function computes for every output.

    The last batch repeats its last row, so that all batches have the same size and share a compiled
    program.
    """
    count = len(jax.tree.leaves(outputs)[0])
    starts = np.arange(0, count, size)[:, None]
    batches = np.minimum(starts + np.arange(size), count - 1)
    found = [np.asarray(function(rows_of(outputs, rows)), float) for rows in batches]
    return np.concatenate(found)[:count]


def joined(batches: list[Value]) -> Value:
    """Concatenates several batches of outputs."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
