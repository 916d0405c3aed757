"""Rewrites a program that draws from a key as a function of normal numbers, for Markov chains."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core._types import Key, PyTree
from dpjax._exact._numerics import is_float, is_key
from dpjax._tracing._walks import Equation, aval, bind, called, equations, parts, run

_PLUMBING = frozenset(("random_fold_in", "random_split", "random_unwrap", "random_wrap"))
_BITS = "random_bits"
_OTHER_KEYS = 16  # The outputs must be the same under this many other keys.
_SHIFT = "shift_right_logical"


@dataclasses.dataclass(frozen=True)
class _Source:
    """A primitive of a program that draws random bits, and the shape and law of its draw.

    Attributes:
        law: what is drawn: random bits, bits that become keys, uniform numbers in [0, 1), or normal
            numbers.
        shape: the shape of the drawn array.
        dtype: the dtype of the drawn array.
        needed: how many of the highest bits are used.
        keys: the keys of the draw in the first evaluation, as words.
    """

    law: Literal["bits", "key", "uniform", "normal"]
    shape: tuple[int, ...]
    dtype: np.dtype
    needed: int
    keys: tuple[bytes, ...]

    @property
    def same(self) -> tuple[object, ...]:
        """Returns a tuple that identifies the drawn numbers: equal tuples mean equal numbers."""
        return self.keys, self.law, self.shape, self.dtype

    @property
    def _pieces(self) -> list[int]:
        """Returns how many random bits each standard normal number of the draw provides.

        The precision of floats limits how many bits can come from one number.
        """
        most = jnp.finfo(jnp.result_type(float)).nmant
        count = max(1, -(-self.needed // most))
        return [len(x) for x in np.array_split(np.arange(self.needed), count)]

    @property
    def latent(self) -> tuple[int, ...]:
        """Returns the shape of the standard normal numbers that `drawn` takes."""
        return len(self._pieces), *self.shape

    def drawn(self, normal: jax.Array) -> jax.Array:
        """Computes the draw, which has the distribution `law`, from standard normal numbers."""
        if self.law == "normal":
            return normal[0].astype(self.dtype)
        if self.law == "uniform":
            largest = np.nextafter(np.ones((), self.dtype), np.zeros((), self.dtype))
            return jnp.minimum(ndtr(normal[0]).astype(self.dtype), largest)
        found, left = jnp.zeros(self.shape, self.dtype), self.dtype.itemsize * 8
        for number, count in zip(normal, self._pieces, strict=True):
            left -= count
            places = jnp.clip(ndtr(number) * 2.0**count, 0, 2.0**count - 1).astype(self.dtype)
            found = found | (places << jnp.asarray(left, self.dtype))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Latents:
    """A program that took a key, rewritten to take independent standard normal numbers instead.

    Each array of random bits in the program is computed from separate normal numbers. The normal
    distribution function turns them into uniform numbers, and these give the bits. So the outputs
    have the same law as under random keys. Uniform numbers, and functions of `jax.random` that use
    them, are differentiable. A loop that draws by rejection gets a key that consists of such bits.

    Attributes:
        sizes: for each draw of the program, how many normal numbers it is computed from.
        evaluate: maps one vector of all normal numbers to the outputs; JAX code.
    """

    sizes: tuple[int, ...]
    evaluate: Callable[[jax.Array], PyTree]

    @classmethod
    def of(cls, function: Callable[[Key], PyTree], key: Key) -> "Latents":
        """Finds the draws of a function of a key, and replaces them.

        Raises:
            ValueError: if a key is used for two draws, or the outputs depend on the key other than
                through its random bits.
        """
        program, outputs = jax.make_jaxpr(function, return_shape=True)(key)
        structure = jax.tree.structure(outputs)
        first = _Walk(key)
        first.run(program)
        sources = _distinct(first.sources)
        places = [[s.same for s in sources].index(one.same) for one in first.sources]
        sizes = [math.prod(source.latent) for source in sources]

        def under(key: Key, normal: jax.Array) -> PyTree:
            ends = itertools.accumulate(sizes)
            each = [
                source.drawn(normal[end - size : end].reshape(source.latent))
                for source, size, end in zip(sources, sizes, ends, strict=True)
            ]
            drawn = [each[place] for place in places]
            return jax.tree.unflatten(structure, _Walk(key, drawn).run(program))

        _check_that_keys_do_not_count(under, key, sum(sizes))
        return cls(tuple(sizes), functools.partial(under, key))

    @property
    def size(self) -> int:
        """Returns the number of normal numbers."""
        return sum(self.sizes)

    @property
    def places(self) -> jax.Array:
        """Returns, for each normal number, the index in `sizes` of the draw that uses it."""
        sizes = np.array(self.sizes, int)
        return jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=self.size)


def _check_that_keys_do_not_count(
    under: Callable[[Key, jax.Array], PyTree], key: Key, size: int
) -> None:
    """Raises an error if the same normal numbers give other outputs under another key."""
    row = jax.random.normal(jax.random.key(1), (size,))
    program = jax.jit(lambda key: under(key, row))
    one = jax.tree.leaves(program(key))
    for i in range(_OTHER_KEYS):
        two = jax.tree.leaves(program(jax.random.fold_in(key, i)))
        same = [np.array_equal(a, b, equal_nan=is_float(a)) for a, b in zip(one, two, strict=True)]
        if not all(same):
            raise ValueError(
                "prior and model must pass their keys only to functions of jax.random if"
                ' method="tempered": otherwise, use method="weighted"'
            )


class _Walk:
    """Evaluates a program with one key. If numbers are given, they replace the program's draws."""

    def __init__(self, key: Key, given: Sequence[jax.Array] | None = None):
        self._key, self._given = key, None if given is None else iter(given)
        self.sources = list[_Source]()

    def run(self, program: Any) -> list[Any]:
        self._program = parts(program)[0]
        return run(program, [self._key], self._operation)

    def _operation(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        inner = called(equation)
        if _draws_floats(equation, "_normal_real"):
            return [self._drawn("normal", aval(equation.outvars[0]), operands[0])]
        if _draws_floats(equation, "_uniform"):
            low, high = (jnp.reshape(x, ()) for x in operands[1:])
            uniform = self._drawn("uniform", aval(equation.outvars[0]), operands[0])
            return [jnp.maximum(low, uniform * (high - low) + low)]
        if inner and any(map(_uses_key, equations(parts(inner)[0]))):
            before, self._program = self._program, parts(inner)[0]
            outputs = run(inner, operands, self._operation)
            self._program = before
            return outputs
        name = equation.primitive.name
        if name == _BITS:
            needed = self._needed(equation)
            return [self._drawn("bits", aval(equation.outvars[0]), operands[0], needed)]
        if name in _PLUMBING or _moves_keys(equation):
            return bind(equation, equation.params, operands)
        if any(_is_key(x) for x in equation.invars):  # This is a loop, or a draw by rejection.
            operands = [
                self._fresh(x) if isinstance(x, jax.Array) and is_key(x) else x for x in operands
            ]
        return bind(equation, equation.params, operands)

    def _drawn(self, law: Any, like: Any, keys: Any, needed: int = 0) -> jax.Array:
        """Returns the next draw if draws were given.

        Otherwise, adds a description of the draw to `sources`, and returns zeros.
        """
        if self._given is not None:
            return next(self._given)
        words = np.asarray(jax.random.key_data(keys))
        each = tuple(row.tobytes() for row in words.reshape(-1, words.shape[-1]))
        self.sources.append(_Source(law, tuple(like.shape), like.dtype, needed, each))
        return jnp.zeros(like.shape, like.dtype)

    def _fresh(self, keys: Any) -> Any:
        """Returns new keys, made of drawn bits. They replace `keys` of the program."""
        words = jax.eval_shape(jax.random.key_data, keys)
        bits = self._drawn("key", words, keys, words.dtype.itemsize * 8)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(keys))

    def _needed(self, equation: Equation) -> int:
        """Returns how many drawn bits are used. A uniform number uses only the highest bits."""
        bits = equation.outvars[0]
        size = aval(bits).dtype.itemsize * 8
        uses = [e for e in self._program.eqns if any(x is bits for x in e.invars)]
        shifts = [e.invars[1] for e in uses if e.primitive.name == _SHIFT and e.invars[0] is bits]
        known = [int(np.asarray(x.val)) for x in shifts if isinstance(x, jex.Literal)]
        is_output = any(x is bits for x in self._program.outvars)
        if is_output or not known or len(known) < len(uses):
            return size
        return size - min(known)


def _distinct(sources: Sequence[_Source]) -> tuple[_Source, ...]:
    """Returns the distinct sources. Refuses a key that is used for two different draws."""
    by_draw: dict[Any, _Source] = {}
    for one in sources:
        before = by_draw.get(one.same, one)
        by_draw[one.same] = max(before, one, key=lambda source: source.needed)
    keys = [key for source in by_draw.values() for key in source.keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            'prior and model must use every key once for method="tempered", got a key that is '
            "used for two draws: split it by jax.random.split"
        )
    return tuple(by_draw.values())


def _draws_floats(equation: Equation, name: str) -> bool:
    """Whether an equation calls `jax.random`'s function `name` with a key and scalars."""
    if equation.params.get("name") != name or not equation.invars:
        return False
    key, *ends = equation.invars
    out = aval(equation.outvars[0])
    alike = all(aval(x).size == 1 and aval(x).dtype == out.dtype for x in ends)
    return _is_key(key) and alike and out.dtype == jnp.result_type(float)


def _uses_key(equation: Equation) -> bool:
    return equation.primitive.name == _BITS or any(map(_is_key, equation.invars))


def _moves_keys(equation: Equation) -> bool:
    """Whether an equation only slices or reshapes keys."""
    return all(map(_is_key, equation.outvars)) and not equation.params.get("jaxpr")


def _is_key(variable: Any) -> bool:
    return is_key(aval(variable))
