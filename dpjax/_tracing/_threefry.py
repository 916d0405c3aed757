"""Faster draws with threefry2x32 keys on a CPU, with the same bits as JAX.

On a CPU, JAX runs the 20 rounds of threefry2x32 as a loop over arrays, and each round writes the
arrays to memory. Here the rounds are unrolled, so that a number stays in registers until the last
round. A draw then takes a quarter of the time, and its compilation takes half the time.

XLA would fuse the unrolled rounds into every loop that uses their results, and so repeat them. To
prevent this, the two words of a draw are computed as results of one reduction, which XLA does not
fuse into later loops (`dpjax/_exact/_kernels.py`).
"""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_prng_impl

from dpjax._core._types import PyTree
from dpjax._exact._kernels import at_once
from dpjax._tracing._walks import Equation, aval, bind, replaced, specs

_THREEFRY = "threefry2x32"  # The name of these keys, and of the primitive that computes all rounds.
_ROTATIONS, _PARITY = ((13, 15, 26, 6), (17, 29, 16, 24)), 0x1BD11BDA


def drawn(draw: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Returns `draw(*arguments)`, with the same bits, but with unrolled rounds on a CPU."""
    # A new function is defined at each call. If the same function object were traced again, JAX
    # would reuse its old trace, even if a closed-over value has changed.
    traced, shapes = jax.make_jaxpr(lambda *xs: draw(*xs), return_shape=True)(*arguments)
    found = replaced(traced, jax.tree.leaves(arguments), _written_out)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _written_out(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array] | None:
    name = equation.primitive.name
    if name == _THREEFRY:
        return lax.platform_dependent(
            *operands, cpu=_rounds, default=lambda *xs: bind(equation, equation.params, xs)
        )
    if name not in ("random_bits", "random_fold_in", "random_split"):
        return None
    keys, *others = operands
    # `Program.trace` refuses users' key implementations, so this name certainly means JAX's own
    # implementation.
    if jax.random.key_impl(keys) != _THREEFRY:
        return None
    words = jax.random.key_data(keys)
    (found,) = replaced(_of_words(equation), [words, *others], _written_out)
    return [found if name == "random_bits" else jax.random.wrap_key_data(found, impl=_THREEFRY)]


def _of_words(equation: Equation) -> jex.ClosedJaxpr:
    """Returns the jaxpr of a draw, as a function of the words of its keys.

    JAX itself would create this jaxpr only at compile time.
    """
    keys, *numbers = map(aval, equation.invars)
    shape = np.broadcast_shapes(keys.shape, *(x.shape for x in numbers))
    given, of_key = equation.params, threefry_prng_impl.key_shape
    draw = {
        "random_bits": lambda key: threefry_prng_impl.random_bits(
            key, given["bit_width"], given["shape"]
        ),
        "random_fold_in": threefry_prng_impl.fold_in,
        "random_split": lambda key: threefry_prng_impl.split(key, given["shape"]),
    }[equation.primitive.name]
    for _ in shape:
        draw = jax.vmap(draw)

    def draws(words: jax.Array, *numbers: jax.Array) -> jax.Array:
        words = jnp.broadcast_to(words, (*shape, *of_key))
        return draw(words, *(jnp.broadcast_to(x, shape) for x in numbers))

    words = jax.ShapeDtypeStruct((*keys.shape, *of_key), jnp.uint32)
    with equation.ctx.manager:
        return jax.make_jaxpr(draws)(words, *specs(numbers))


def _rounds(*operands: jax.Array) -> Sequence[jax.Array]:
    """Computes all 20 rounds of threefry2x32 (Salmon et al. 2011).

    After every fourth round, words of the key are added.
    """
    one, two, x, y = jnp.broadcast_arrays(*operands)
    key = one, two, one ^ two ^ jnp.uint32(_PARITY)
    x, y = x + one, y + two
    for group in range(1, 6):
        for places in _ROTATIONS[(group - 1) % 2]:
            x = x + y
            y = x ^ (y << places | y >> (32 - places))
        x, y = x + key[group % 3], y + key[(group + 1) % 3] + jnp.uint32(group)
    return at_once([x, y])
