"""One release about each random pair, and how much it loses, rounded up.

docs/proofs/privacy-profile.md derives the margins.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from dpjax._core._types import Key, PyTree
from dpjax._tracing._programs import Program
from dpjax.auditing._profile_pairs import Joint, Stretches
from dpjax.sensitivity._pairs import RandomPair, position_key

# The noise of a pair has a key of its own, beside those of its position and its rotation.
_NOISE = 2
# Uniform numbers are the upper ends of so many cells, which float32 holds exactly.
_CELLS = 2**24
# Bound what a device's logarithm and its normal quantile are off: relative, and absolute.
LOG_ERROR = 2.0**-16, 2.0**-18
QUANTILE_ERROR = 2.0**-14
# No finite normal quantile of the cells is larger.
_LARGEST_NORMAL = 6.0
# How far the shift of a randomized response may be off, relative and absolute.
_SHIFT_ERROR = 2.0**-10


@dataclasses.dataclass(frozen=True)
class ReleasedPair(RandomPair):
    """A random pair, and one release about it.

    Attributes:
        loss: takes the difference of two values and a key to the loss of a release.
    """

    loss: Program | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its stretch and its loss."""
        return (2,)

    def distance(
        self, key: Key, index: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The stretch and the loss of pair `index`, and the resolution of the target's value."""
        noise = jax.random.fold_in(position_key(key, index), _NOISE)

        def both(moved: PyTree) -> jax.Array:
            assert self.loss is not None
            return jnp.stack([self.norm(moved), self.loss(moved, noise)])

        released = dataclasses.replace(self, norm=both)
        found, resolution = RandomPair.distance(released, key, index, position)
        return found, resolution[0]


def with_releases(joint: Joint, pair: RandomPair) -> RandomPair:
    """The pair with a release, unless the curve of its stretch is exact."""
    if _independent_parts(joint, pair) < 2:
        return pair
    moved, key = pair.norm.inputs.argument(0).tree(), pair.oracle.inputs.argument(0).tree()
    loss = Program.trace("loss", functools.partial(joint_loss, joint), moved, key)
    fields = {field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)}
    return ReleasedPair(**fields, loss=loss)


def _independent_parts(joint: Joint, pair: RandomPair) -> int:
    """How many losses add up."""
    parts = 0
    for loss, arrays in zip(joint.losses, pair.target.outputs.tree(), strict=True):
        if loss.family != "gaussian":
            parts += sum(x.size for x in jax.tree.leaves(arrays)) if loss.shifts else 1
    return parts + (joint.deviations > 0)


def joint_loss(joint: Joint, moved: PyTree, key: Key) -> jax.Array:
    """The loss of one release of all about a pair, but for the errors of shifts."""
    parts = list(zip(joint.losses, moved, strict=True))
    shifts = [jnp.ravel(a) for loss, x in parts if loss.shifts for a in loss.shifts(x)]
    pure = [loss.shift(x)[None] for loss, x in parts if loss.family in ("range", "pure")]
    normal = [loss.shift(x)[None] for loss, x in parts if loss.family == "gaussian"]
    groups = [(_of_laplace, shifts), (_of_randomized_response, pure), (_of_gaussian, normal)]
    total = jnp.zeros((), jnp.float32)
    for number, (of_shifts, found) in enumerate(groups):
        if found:
            a = jnp.abs(jnp.concatenate(found))
            total += jnp.sum(of_shifts(jax.random.fold_in(key, number), a))
    return total


def _uniforms(key: Key, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Upper ends of the cells of uniform numbers, in (0, 1], and coins that are fair."""
    bits = jax.random.bits(key, like.shape, jnp.uint32)
    return ((bits >> 8) + 1).astype(like.dtype) / _CELLS, (bits & 1) == 1


def _of_laplace(key: Key, a: jax.Array) -> jax.Array:
    """|z + a| - |z|, which grows with z: above 0 for one half, and minus an exponential below."""
    uniform, above = _uniforms(key, a)
    relative, absolute = LOG_ERROR
    depth = jnp.maximum(-jnp.log(uniform) * (1 - relative) - absolute, 0)
    return jnp.where(above, a, jnp.maximum(a - 2 * depth, -a))


def _of_randomized_response(key: Key, a: jax.Array) -> jax.Array:
    uniform, _ = _uniforms(key, a)
    likely = jax.nn.sigmoid(a * (1 + _SHIFT_ERROR) + _SHIFT_ERROR) + 2.0**-20
    return jnp.where(uniform - 1 / _CELLS < likely, a, -a)


def _of_gaussian(key: Key, distances: jax.Array) -> jax.Array:
    mu = jnp.sqrt(jnp.sum(jnp.square(distances), keepdims=True))
    uniform, _ = _uniforms(key, mu)
    z = ndtri(uniform)
    return mu * (z + QUANTILE_ERROR * (1 + jnp.abs(z))) + mu * mu / 2


def losses_of(stretches: Stretches, joint: Joint) -> np.ndarray:
    """An upper bound on the loss of the release about each pair, in the order of the pairs."""
    losses = np.asarray(stretches.losses)
    if max(stretches.relative, stretches.absolute * joint.pure) > _SHIFT_ERROR:
        return np.full_like(losses, np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        pure, normal = stretches.values * joint.pure, stretches.values * joint.deviations
        off = stretches.relative * pure + stretches.absolute * joint.pure
        normal_off = stretches.relative * normal + stretches.absolute * joint.deviations
        return losses + 2 * off + 2 * normal_off * (_LARGEST_NORMAL + normal)
