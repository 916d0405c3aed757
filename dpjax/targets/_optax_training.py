"""`optax_training` and `optax_minibatch_training`: trained parameters as a target."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Target
from dpjax.random._keys import check_sampling_key

if TYPE_CHECKING:
    import optax

Loss = Callable[[PyTree, Database], jax.Array]


def optax_training(
    loss: Loss,
    parameters: PyTree,
    optimizer: "optax.GradientTransformation",
    *,
    steps: int,
    average_last: int = 1,
) -> Target:
    """Training by full gradients, as a target: the parameters after a fixed number of steps.

    theta_(s+1) = theta_s + update_s(gradient of loss(theta_s, D)), for s = 0, ..., steps - 1. The
    number of steps is fixed and public, so the target is a pure function of the database.

    Args:
        loss: `loss(parameters, database)`, a scalar that ignores the order of the records, such as
            an average over them.
        parameters: theta_0, public: a pytree of float arrays.
        optimizer: from optax, such as `optax.adam(0.1)`. For optimizers with a line search, the
            target also passes the value of the loss, its gradient, and the loss as a function.
        steps: optimizer steps, at least 1.
        average_last: the number of last steps over which the returned parameters are averaged.

    Returns:
        A target: maps a database, a pytree of arrays with leading axis n, to the trained
        parameters, a pytree like `parameters`. If training diverges they are NaN or infinite; a
        mechanism still releases a value in its range.

    Raises:
        TypeError: if loss is not a function, the parameters are not floats, the optimizer has no
            `init` and `update`, or a number is not an integer; on a database, if the loss does not
            return a scalar.
        ValueError: if there are no parameters, steps is below 1, or average_last not in [1, steps].

    Formal guarantees:
        No global bound is known in general: use `dpjax.sample_sensitivity`. The target is defined
        as the result of exactly these steps, converged or not, so there is no solver error.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which only runs the target.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from dpjax import targets
        >>> fit = targets.optax_training(
        ...     lambda w, x: jnp.mean((x - w) ** 2), jnp.zeros(()), optax.sgd(0.5), steps=1
        ... )
        >>> float(fit(jnp.array([1.0, 3.0])))
        2.0
    """
    return _training(
        loss, parameters, optimizer, steps, average_last, lambda step, database: database
    )


def optax_minibatch_training(
    key: Key,
    loss: Loss,
    parameters: PyTree,
    *,
    optimizer: "optax.GradientTransformation",
    steps: int,
    batch_size: int,
    average_last: int = 1,
) -> Target:
    """Training by minibatches drawn with a public key, as a target.

    Like `optax_training`, but step s takes the gradient on `batch_size` records. Their positions
    are drawn without replacement, and depend only on the key and s.

    Args:
        key: a public typed key. Use the same key for all databases, both to sample a sensitivity
            and to release. It gives no privacy. Never pass a key that a release draws noise with.
        loss: `loss(parameters, batch)`, a scalar.
        parameters: as for `optax_training`.
        optimizer: from optax.
        steps: optimizer steps, at least 1.
        batch_size: records in a minibatch, at least 1 and at most n.
        average_last: as for `optax_training`.

    Returns:
        A target, as `optax_training` does.

    Raises:
        TypeError: if the key is not a typed key, or as for `optax_training`.
        ValueError: as for `optax_training`; on a database, if it has fewer than `batch_size`
            records.

    Formal guarantees:
        No global bound is known. The target depends on the order of the records: a record in a late
        batch has more influence. Sample the sensitivity with positions="average", whose guarantee
        is an average over positions, or with positions="each".

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which only runs the target.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import dpjax
        >>> fit = dpjax.targets.optax_minibatch_training(
        ...     dpjax.random.seeded_key(0),
        ...     lambda w, x: jnp.mean((x - w) ** 2),
        ...     jnp.zeros(()),
        ...     optimizer=optax.sgd(0.1),
        ...     steps=50,
        ...     batch_size=2,
        ... )
        >>> bool(1 < fit(jnp.array([1.0, 2.0, 3.0])) < 3)
        True
    """
    check_sampling_key(key)
    size = _checks.integer("batch_size", batch_size, least=1)

    def batch(step: jax.Array, database: Database) -> Database:
        n = len(jax.tree.leaves(database)[0])
        if n < size:
            raise ValueError(f"batch_size must be at most n={n}, got {size}")
        chosen = jax.random.permutation(jax.random.fold_in(key, step), n)[:size]
        return jax.tree.map(functools.partial(jnp.take, indices=chosen, axis=0), database)

    return _training(loss, parameters, optimizer, steps, average_last, batch)


def _training(
    loss: Loss,
    parameters: PyTree,
    optimizer: "optax.GradientTransformation",
    steps: int,
    average_last: int,
    batch: Callable[[jax.Array, Database], Database],
) -> Target:
    """Makes a target that trains on batch(step, database) at every step."""
    import optax

    steps = _checks.integer("steps", steps, least=1)
    averaged = _checks.integer("average_last", average_last, least=1, most=steps)
    _checks.function("loss", loss)
    start = _checks.real_arrays("parameters", parameters)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(start)}
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(f"parameters must be floats, got dtypes {sorted(dtypes)}")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"optimizer must be from optax, got {_checks.shown(optimizer)}")
    update = optax.with_extra_args_support(optimizer).update

    def train(database: Database) -> PyTree:
        # The state consists of the current parameters, the optimizer state, and the average of the
        # parameters of the last `averaged` steps.
        def advance(state: tuple[PyTree, ...], step: jax.Array) -> tuple[tuple[PyTree, ...], None]:
            current, memory, mean = state
            records = batch(step, database)

            def value_of(at: PyTree) -> jax.Array:
                return loss(at, records)

            value, gradient = jax.value_and_grad(value_of)(current)
            with optax_promotion():
                updates, memory = update(
                    gradient, memory, current, value=value, grad=gradient, value_fn=value_of
                )
                current = optax.apply_updates(current, updates)
            if averaged == 1:  # A separate average would double the memory.
                return (current, memory, current), None
            return (current, memory, _mean_with(mean, current, step - steps + averaged)), None

        with optax_promotion():
            begin = (start, optimizer.init(start), start)
        return jax.lax.scan(advance, begin, jnp.arange(steps))[0][2]

    return train


def _mean_with(mean: PyTree, current: PyTree, before: jax.Array) -> PyTree:
    """Returns the mean of `before` earlier points and the current one; current if before <= 0."""

    def updated(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(before > 0, x + (y - x) / (before + 1).astype(x.dtype), y)

    return jax.tree.map(updated, mean, current)


@contextlib.contextmanager
def optax_promotion() -> Generator[None]:
    """Makes JAX promote dtypes and ranks by its default rules, on which optax relies."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
