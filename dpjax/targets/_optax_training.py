"""Training with optax: the learned parameters as a function of the database."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax.random._facade import check_sampling_key

if TYPE_CHECKING:
    import optax

Loss = Callable[[Any, Any], jax.Array]


def optax_training(
    loss: Loss,
    parameters: Any,
    optimizer: "optax.GradientTransformation",
    *,
    steps: int,
    average_last: int = 1,
) -> Callable[[Any], Any]:
    """Training by full gradients, as a target: the parameters after so many optimizer steps.

    theta_(s+1) = theta_s + update_s(gradient of loss(theta_s, D)), for s = 0, ..., steps - 1. The
    number of steps is fixed and public, so the target is a pure function of the database.

    Args:
        loss: `loss(parameters, database)`, a scalar that ignores the order of the records, such as
            an average over them.
        parameters: theta_0, public: a pytree of float arrays.
        optimizer: from optax, such as `optax.adam(0.1)`; it is also given the value of the loss,
            its gradient and the loss as a function, for those that search along a line.
        steps: optimizer steps, at least 1.
        average_last: of the parameters after so many last steps the average is taken.

    Returns:
        A target: takes a database, a pytree of arrays with leading axis n, to the trained
        parameters, a pytree like `parameters`. Where training diverges they are NaN or infinite,
        and a mechanism releases something in range.

    Raises:
        TypeError: if loss is not a function, the parameters are not floats, the optimizer has no
            `init` and `update`, or a number is not an integer; on a database, if the loss does not
            return a scalar.
        ValueError: if there are no parameters, steps is below 1, or average_last not in [1, steps].

    Formal guarantees:
        No global bound is known in general, which is what `dpjax.sample_sensitivity` is for. What
        is released is the result of these steps, converged or not, so no error of a solver is left
        out.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which asks for no more than a program to run.

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
    steps, averaged = _step_counts(steps, average_last)
    return _training(loss, parameters, optimizer, steps, averaged, lambda step, database: database)


def optax_minibatch_training(
    key: jax.Array,
    loss: Loss,
    parameters: Any,
    *,
    optimizer: "optax.GradientTransformation",
    steps: int,
    batch_size: int,
    average_last: int = 1,
) -> Callable[[Any], Any]:
    """Training by minibatches drawn with a public key, as a target.

    As `optax_training`, but step s takes the gradient on `batch_size` records, drawn without
    replacement by their positions, from the key and s alone.

    Args:
        key: a typed key, public: the same for all databases, sampled and released. It hides
            nothing, so never one that a release uses.
        loss: `loss(parameters, batch)`, a scalar.
        parameters: theta_0, public: a pytree of float arrays.
        optimizer: from optax.
        steps: optimizer steps, at least 1.
        batch_size: records in a minibatch, at least 1 and at most n.
        average_last: of the parameters after so many last steps the average is taken.

    Returns:
        A target: takes a database, a pytree of arrays with leading axis n, to the trained
        parameters, a pytree like `parameters`.

    Raises:
        TypeError: if the key is not a typed key, loss is not a function, the parameters are not
            floats, the optimizer has no `init` and `update`, or a number is not an integer; on a
            database, if the loss does not return a scalar.
        ValueError: if there are no parameters, a number is below 1, or average_last above steps; on
            a database, if it has fewer than `batch_size` records.

    Formal guarantees:
        No global bound is known. The target depends on the order of the records: late batches
        count for more. Sample it with positions="average", whose guarantee is averaged over the
        positions, or positions="each".

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which asks for no more than a program to run.

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

    def batch(step: jax.Array, database: Any) -> Any:
        n = len(jax.tree.leaves(database)[0])
        if n < size:
            raise ValueError(f"batch_size must be at most n={n}, got {size}")
        chosen = jax.random.permutation(jax.random.fold_in(key, step), n)[:size]
        return jax.tree.map(lambda leaf: jnp.take(leaf, chosen, axis=0), database)

    steps, averaged = _step_counts(steps, average_last)
    return _training(loss, parameters, optimizer, steps, averaged, batch)


def _step_counts(steps: Any, average_last: Any) -> tuple[int, int]:
    steps = _checks.integer("steps", steps, least=1)
    return steps, _checks.integer("average_last", average_last, least=1, most=steps)


def _training(
    loss: Loss,
    parameters: Any,
    optimizer: "optax.GradientTransformation",
    steps: int,
    averaged: int,
    batch: Callable[[jax.Array, Any], Any],
) -> Callable[[Any], Any]:
    """Training on batch(step, database) at every step."""
    import optax

    _checks.function("loss", loss)
    start = _float_arrays(parameters)
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"optimizer must be one of optax's, got {_checks.shown(optimizer)}")
    update = optax.with_extra_args_support(optimizer).update

    def train(database: Any) -> Any:
        def advance(current: Any, memory: Any, step: jax.Array) -> tuple[Any, Any]:
            records = batch(step, database)

            def value_of(at: Any) -> jax.Array:
                return loss(at, records)

            value, gradient = jax.value_and_grad(value_of)(current)
            with _optax_promotion():
                updates, memory = update(
                    gradient, memory, current, value=value, grad=gradient, value_fn=value_of
                )
                return optax.apply_updates(current, updates), memory

        def advance_and_average(
            state: tuple[Any, Any, Any], step: jax.Array
        ) -> tuple[tuple[Any, Any, Any], None]:
            current, memory, mean = state
            current, memory = advance(current, memory, step)
            # A single one is its own average, and is not kept twice.
            mean = (
                current if averaged == 1 else _running_mean(mean, current, step - steps + averaged)
            )
            return (current, memory, mean), None

        with _optax_promotion():
            begin = (start, optimizer.init(start), start)
        (_, _, trained), _ = jax.lax.scan(advance_and_average, begin, jnp.arange(steps))
        return trained

    return train


def _running_mean(mean: Any, current: Any, before: jax.Array) -> Any:
    """The mean of `before` points and the current one; where there are none, the current one."""

    def moved(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(before > 0, x + (y - x) / (before + 1).astype(x.dtype), y)

    return jax.tree.map(moved, mean, current)


@contextlib.contextmanager
def _optax_promotion() -> Iterator[None]:
    """JAX's default promotion of dtypes and ranks: optax's own code does not run without it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _float_arrays(parameters: Any) -> Any:
    arrays = _checks.real_arrays("parameters", parameters)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(arrays)}
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(f"parameters must be floats, got dtypes {sorted(dtypes)}")
    return arrays
