"""Targets made by libraries of JAX: each is traced, sampled and released, and is what JAX runs.

Their operations have parameters of all kinds, and some are not JAX's own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._tracing._host_calls import is_own
from dpjax._tracing._programs import Program
from dpjax._tracing._walks import equations

pytestmark = [
    pytest.mark.slow,  # They come with the extra `frameworks`, which only slow tests install.
    pytest.mark.filterwarnings("default"),  # Theirs are not ours to fix.
]

N = 12


def key():
    return jax.random.key(3)


def normal_model():
    import numpyro
    from numpyro import distributions

    def model(database):
        center = numpyro.sample("center", distributions.Normal(0, 1))
        numpyro.sample("x", distributions.Normal(center, 1), obs=database)

    return model


def numpyro_svi(database):
    from numpyro import infer, optim
    from numpyro.infer.autoguide import AutoNormal

    model = normal_model()
    svi = infer.SVI(model, AutoNormal(model), optim.Adam(0.05), infer.Trace_ELBO())
    return svi.run(key(), 10, database, progress_bar=False).params


def numpyro_nuts(database):
    from numpyro import infer

    chain = infer.MCMC(
        infer.NUTS(normal_model()), num_warmup=3, num_samples=3, progress_bar=False
    )  # fmt: skip
    chain.run(key(), database)
    return jnp.mean(chain.get_samples()["center"])


def chain_of(kernel, steps):
    def step(state, key):
        state, _ = kernel.step(key, state)
        return state, state.position

    _, positions = jax.lax.scan(step, kernel.init(jnp.zeros(1)), jax.random.split(key(), steps))
    return jnp.mean(positions)


def log_density(database):
    return lambda x: -0.5 * jnp.sum((database - x) ** 2)


def blackjax_hmc(database):
    import blackjax

    return chain_of(blackjax.hmc(log_density(database), 0.05, jnp.ones(1), 5), 5)


def blackjax_nuts(database):
    import blackjax

    return chain_of(blackjax.nuts(log_density(database), 0.1, jnp.ones(1)), 3)


def logistic(w, database):
    return jnp.mean(jax.nn.softplus(database - w)) + jnp.sum(w**2)


def optimistix_levenberg_marquardt(database):
    import optimistix

    def residuals(w, database):
        return database - jnp.tanh(w)

    solver = optimistix.LevenbergMarquardt(1e-6, 1e-6)
    return optimistix.least_squares(
        residuals, solver, jnp.zeros(()), args=database, throw=False
    ).value  # fmt: skip


def optimistix_bfgs(database):
    import optimistix

    solver = optimistix.BFGS(1e-5, 1e-5)
    return optimistix.minimise(logistic, solver, jnp.zeros(()), args=database, throw=False).value


def optimistix_newton(database):
    import optimistix

    def slope(w, database):
        return jnp.mean(jnp.tanh(w - database))

    solver = optimistix.Newton(1e-5, 1e-5)
    return optimistix.root_find(slope, solver, jnp.zeros(()), args=database, throw=False).value


def optimistix_fixed_point(database):
    import optimistix

    def step(w, database):
        return jnp.mean(database) + 0.5 * jnp.sin(w)

    solver = optimistix.FixedPointIteration(1e-5, 1e-5)
    return optimistix.fixed_point(step, solver, jnp.zeros(()), args=database, throw=False).value


def design(database):
    return jnp.stack([jnp.ones_like(database), database], axis=1)


def lineax_lu(database):
    import lineax

    x = design(database)
    operator = lineax.MatrixLinearOperator(x.T @ x + jnp.eye(2))
    return lineax.linear_solve(operator, x.T @ database**2, throw=False).value


def lineax_qr(database):
    import lineax

    operator = lineax.MatrixLinearOperator(design(database))
    return lineax.linear_solve(operator, database**2, lineax.QR(), throw=False).value


def lineax_conjugate_gradients(database):
    import lineax

    x = design(database)
    operator = lineax.FunctionLinearOperator(
        lambda w: x.T @ (x @ w) + w,
        jax.ShapeDtypeStruct((2,), database.dtype),
        lineax.positive_semidefinite_tag,
    )
    solver = lineax.CG(1e-5, 1e-5)
    return lineax.linear_solve(operator, x.T @ database**2, solver, throw=False).value


def equinox_network(database):
    import equinox as eqx

    model = eqx.nn.MLP(1, "scalar", 4, 1, key=key())

    @eqx.filter_grad
    def gradient(model):
        return jnp.mean(jax.vmap(model)(database[:, None]) ** 2)

    return [x for x in jax.tree.leaves(gradient(model)) if eqx.is_array(x)]


def equinox_loop(database):
    import equinox as eqx

    def step(carry):
        count, w = carry
        return count + 1, w - 0.5 * jax.grad(logistic)(w, database)

    start = jnp.array(0), jnp.zeros(())
    return eqx.internal.while_loop(
        lambda carry: carry[0] < 5, step, start, max_steps=8, kind="checkpointed"
    )[1]  # fmt: skip


def flax_nnx(database):
    from flax import nnx

    def loss(model):
        return jnp.mean((model(database[:, None]) - 1) ** 2)

    return jax.tree.leaves(nnx.grad(loss)(nnx.Linear(1, 1, rngs=nnx.Rngs(0))))


def flax_linen(database):
    from flax import linen

    model = linen.Dense(1)
    start = model.init(key(), jnp.zeros(1))
    return jax.grad(lambda w: jnp.mean(model.apply(w, database[:, None]) ** 2))(start)


def ott_sinkhorn(database):
    from ott.geometry.pointcloud import PointCloud
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn

    grid = jnp.linspace(0.0, 1.0, 8)
    problem = LinearProblem(PointCloud(database[:, None], grid[:, None], epsilon=0.1))
    return Sinkhorn(max_iterations=20)(problem).reg_ot_cost


def tinygp_likelihood(database):
    import tinygp

    process = tinygp.GaussianProcess(tinygp.kernels.ExpSquared(0.3), database, diag=0.1)
    return process.log_probability(jnp.sin(database))


def solved_by(solver, database):
    import diffrax

    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: -rate * y),
        solver,
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=1.0,
        args=jnp.mean(database),
        stepsize_controller=diffrax.PIDController(1e-3, 1e-5),
        max_steps=64,
        throw=False,
    ).ys


def diffrax_explicit(database):
    import diffrax

    return solved_by(diffrax.Tsit5(), database)


def diffrax_implicit(database):
    import diffrax

    return solved_by(diffrax.Kvaerno3(), database)


def jaxopt_lbfgs(database):
    import jaxopt

    return jaxopt.LBFGS(logistic, maxiter=5).run(jnp.zeros(()), database).params


def jaxopt_projected_gradient(database):
    import jaxopt

    def loss(w, database):
        return jnp.sum((w - jnp.stack([jnp.mean(database), jnp.max(database)])) ** 2)

    simplex = jaxopt.projection.projection_simplex
    solver = jaxopt.ProjectedGradient(loss, lambda w, _=None: simplex(w), maxiter=10)
    return solver.run(jnp.ones(2) / 2, database=database).params


def optax_lbfgs(database):
    import optax

    def loss(w):
        return logistic(w, database)

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        w, state = carry
        value, gradient = value_and_grad(w, state=state)
        updates, state = optimizer.update(
            gradient, state, w, value=value, grad=gradient, value_fn=loss
        )
        return (optax.apply_updates(w, updates), state), None

    w = jnp.zeros(())
    return jax.lax.scan(step, (w, optimizer.init(w)), length=3)[0][0]


TARGETS = (
    *(numpyro_svi, numpyro_nuts, blackjax_hmc, blackjax_nuts),
    *(optimistix_levenberg_marquardt, optimistix_bfgs, optimistix_newton, optimistix_fixed_point),
    *(lineax_lu, lineax_qr, lineax_conjugate_gradients, equinox_network, equinox_loop),
    *(flax_nnx, flax_linen, ott_sinkhorn, tinygp_likelihood, diffrax_explicit, diffrax_implicit),
    *(jaxopt_lbfgs, jaxopt_projected_gradient, optax_lbfgs),
)


@pytest.fixture
def lenient():
    """What libraries write, and dpjax does not."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_a_target_of_a_library_is_sampled_and_released(target, lenient):
    people = jax.ShapeDtypeStruct((N,), jnp.float32)
    program = Program.trace("target", target, people)
    assert program.fingerprint == Program.trace("target", target, people).fingerprint
    assert all(is_own(equation.primitive) for equation in equations(program.jaxpr.jaxpr))
    sensitivity = dpjax.sample_sensitivity(
        dpjax.random.seeded_key(0),
        target,
        lambda key, n: jax.random.uniform(key, (n,)),
        n=N,
        norm="l2",
        m=21,
        positions="average",  # What a solver leaves undone may depend on the order.
        chunk_size=7,
        allow_cancellation=True,
    )
    # Hardly any noise, so that what is released can be compared.
    mechanism = dpjax.laplace(dpjax.assume_sensitivity(1e-4, norm="l1"), 1e3)
    database = np.linspace(0, 1, N, dtype=np.float32)
    value = jax.jit(target)(database)
    release = dpjax.privatize(target, mechanism)(dpjax.random.seeded_key(1), database)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), release.value, value)
    dpjax.privatize(target, dpjax.gaussian(sensitivity, 0.5, 1e-3))
