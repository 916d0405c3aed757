"""Steps of correlated noise whose integers and noise a test reads, or sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import learning
from dpjax._exact import _limbs
from dpjax.learning import _correlated_noise as module
from dpjax.learning._clipping import sealed
from dpjax.learning._sampling import Turn

DIMS = 5
PARAMETERS = {"a": jnp.zeros(3), "b": jnp.zeros(DIMS - 3)}


def total(value, norm_bound=1.0):
    """A clipped sum with this value."""
    tree = {"a": jnp.asarray(value[:3], jnp.float32), "b": jnp.asarray(value[3:], jnp.float32)}
    bound = jnp.float32(norm_bound)
    return sealed(tree, bound, jnp.int32(0), jnp.zeros(1), None, 1, 0, Turn())


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def rounded(sums, grid):
    """The integers of sums on a grid, halves up."""
    return [[int(np.floor(float(x) / grid + 0.5)) for x in row] for row in sums]


class PublishedSteps:
    """Runs trainings, and returns their integers, noise, scales, steps of the grid and updates.

    With `outputs`, the noise is such that each step publishes these integers.
    """

    def __init__(self):
        self._seen, self._wanted = [], []
        # A function of its own, because JAX would give a trace of the same function to others.
        step = module._step.__wrapped__
        self._step = jax.jit(lambda *arguments: step(*arguments))

    def __call__(self, strategy, sums, outputs=()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "add_integer_noise", self._add)
            patch.setattr(module, "_step", self._step)
            self._seen.clear()
            self._wanted[:] = list(outputs)
            return self._trained(strategy, sums)

    def _record(self, high, low, drawn, scale):
        integers = np.int64(np.int32(high)) * 2**32 + np.int64(low)
        noise = self._wanted[len(self._seen)] - integers if self._wanted else np.int64(drawn)
        self._seen.append((integers, noise, scale))
        return np.int32(noise)

    def _add(self, key, steps, scale, exponent, dtypes, distribution):
        del distribution, exponent
        size = sum(x.low.size for x in steps)
        limbs = [jnp.concatenate([getattr(x, limb).ravel() for x in steps]) for limb in x_limbs]
        drawn = jax.random.randint(key, (size,), -10_000, 10_000)
        noise = jax.pure_callback(self._record, drawn, *limbs, drawn, scale)
        parts = jnp.split(noise, np.cumsum([x.low.size for x in steps])[:-1])
        whole = [
            _limbs.add(x, _limbs.from_integers(part.reshape(x.low.shape)))
            for x, part in zip(steps, parts, strict=True)
        ]
        return [_limbs.to_float(x, dtype) for x, dtype in zip(whole, dtypes, strict=True)]

    def _trained(self, strategy, sums):
        transform = learning.correlated_noise(
            dpjax.random.seeded_key(1), strategy=strategy, noise_multiplier=2.0, batch_size=1
        )
        state, updates = transform.init(PARAMETERS), []
        for value in sums:
            update, state = transform.update(total(value), state)
            updates.append(flat(update))
        integers, noise, scales = map(np.array, zip(*self._seen, strict=True))
        grid = 2.0 ** int(module._grid(jnp.float32(1), state, 2.0)[0])
        return integers, noise, scales, grid, np.array(updates)


x_limbs = ("high", "low")
