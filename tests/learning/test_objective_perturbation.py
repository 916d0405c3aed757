"""Objective perturbation: its bound, its solver, its noise."""

import jax
import numpy as np
import pytest
from scipy import special, stats

import dpjax
from dpjax._core._pytree import changed
from dpjax.learning import _objective_perturbation as mechanism
from dpjax.learning import _objective_perturbation as plans
from dpjax.learning import _objective_perturbation as solver
from dpjax.learning import objective_perturbation
from dpjax.random import GAUSSIAN

N, D = 64, 3
SETTINGS = [
    # regularization, n, epsilon, delta
    (0.01, 1000, 1.0, 1e-5),
    (0.3, 2, 1.0, 1e-2),  # The determinant takes .35 of epsilon.
    (0.05, 10**6, 0.1, 1e-7),  # In float32 most noise is on the weights.
    (1.0, 10, 8.0, 0.2),
]


def training(strength=0.1, n=N, dims=D, epsilon=1.0, delta=1e-5, **options):
    return objective_perturbation(
        regularization=strength, n=n, dims=dims, epsilon=epsilon, delta=delta, **options
    )


def reach(angle, radius):
    """The largest of b'v / |b|: b at this angle, and any two records, and weights within radius.

    Records r' and -r are at angles a and -a. Each has the length that is worst for it.
    """
    a, t = np.meshgrid(np.linspace(0, np.pi / 2, 31), np.linspace(-np.pi, np.pi, 61))
    lengths = np.linspace(0, 1, 9)[1:, None, None]
    found = 0.0
    for share in (0.5, 1.0):
        total = 0.0
        for side, sign in ((a, -1), (-a, 1)):
            margin = sign * share * radius * np.cos(t - side)
            slope = np.max(lengths * special.expit(lengths * margin), axis=0)
            total = total + slope * np.maximum(np.cos(angle - side), 0)
        found = max(found, np.max(total))
    return found


def divergence(made, n):
    """The hockey-stick divergence of the bound on the privacy loss, by quadrature."""
    plan, epsilon = made.plan, float(made.epsilon)
    kappa = np.log1p(1 / (4 * n * made.regularization))
    angles = (np.arange(60) + 0.5) / 60 * np.pi
    lengths = (np.arange(1000) + 0.5) / 1000 * 14
    weights = lengths * np.exp(-(lengths**2) / 2)
    radius = float(plan.solver.radius)
    reaches = np.array([reach(angle, radius) for angle in angles])
    # The largest of the inner products of b and how far the records' gradients are apart.
    sigma, largest = float(plan.linear_scale), reach(0.0, radius)
    loss = kappa + lengths[:, None] * reaches / sigma + (largest / sigma) ** 2 / 2
    mu = 2 * plan.error / plan.output_scale
    gap = (epsilon - loss) / mu
    inner = special.ndtr(mu / 2 - gap) - np.exp(epsilon - loss) * special.ndtr(-mu / 2 - gap)
    return np.mean(inner, axis=1) @ weights / np.sum(weights)


@pytest.mark.parametrize("radius", [0.05, 0.9, 1.27, 1.28, 1.7, 3.0, 12.0, 300.0, 1e9])
def test_no_two_records_pull_further_than_is_charged(radius):
    """Any lengths of records, any weights in the ball; the bound is nearly reached."""
    far, tails = plans._pull_within(radius)
    generator = np.random.default_rng(1)
    most = special.expit(radius)
    for angle in np.linspace(0, np.pi / 2, 9)[:-1]:
        bound = max(plans._both_pulls(angle, radius), most)
        assert reach(angle, radius) <= bound
    assert reach(0.0, radius) > 0.98 * far or radius > 100
    for d in (1, 2, 3):
        r, s, theta, z = (generator.normal(size=(2000, d)) for _ in range(4))
        for vectors in (r, s, theta):
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        s[::2] = -r[::2]  # Half of all pairs are opposite.
        r, s = (np.minimum(generator.uniform(0, 1.5, size=(2000, 1)), 1) * v for v in (r, s))
        theta *= radius
        for one, other in zip(r[:20], s[:20], strict=True):
            v = [special.expit(-theta @ x)[:, None] * x for x in (one, other)]
            assert np.all(np.linalg.norm(v[1] - v[0], axis=1) <= far)
            # The weights may follow b, so the worst weights count for each b.
            worst = np.max(z @ (v[1] - v[0])[:200].T, axis=1) / far
            for y in (0.5, 1.0, 2.0):
                tail = tails[np.searchsorted(plans._INTERVALS, y)]
                # Exceeded by chance with probability below 1e-6.
                assert np.mean(worst > y) <= tail + 5 * np.sqrt(tail / 2000) + 0.01
    angles = (np.arange(24) + 0.5) / 24 * np.pi
    reaches = np.array([reach(angle, radius) for angle in angles])
    for y in (0.25, 0.5, 1.0, 2.0, 4.0):
        tail = tails[np.searchsorted(plans._INTERVALS, y)]
        assert np.mean(np.exp(-((y * far / reaches) ** 2) / 2)) <= 1.03 * tail
    assert tails[0] == 1
    assert np.all(np.diff(tails) <= 0)


@pytest.mark.parametrize("radius", [0.05, 0.9, 1.27, 1.28, 3.0, 12.0, 300.0, 1e9])
def test_averages_of_slopes_are_within_the_slope_of_the_average(radius):
    """Jensen's inequality, for slopes of records of any length."""
    generator = np.random.default_rng(2)
    one, other = generator.uniform(-1, 1, (2, 4000)) * generator.choice([1, 1e-2, 1e-4], 4000)
    one[:1000], other[1000:2000] = -1, 1
    share = generator.uniform(0, 1, 4000)
    average = share * one + (1 - share) * other
    lengths = np.linspace(0, 1, 101)[1:, None]
    slope = [np.max(lengths * special.expit(lengths * radius * u), axis=0) for u in (one, other)]
    total = share * slope[0] + (1 - share) * slope[1]
    found = plans._slope_envelope(radius * np.maximum(average, 0), radius)
    assert np.all(total[average >= 0] <= found[average >= 0] * (1 + 1e-12))


def test_noise_is_less_than_for_gradients_that_cannot_occur_together():
    """Both of length S, in opposite directions, needed these scales."""
    for strength, before in ((0.1, 6.654), (0.5, 5.201)):
        assert training(strength, 1000).plan.linear_scale < before / 1.28


@pytest.mark.parametrize(("strength", "n", "epsilon", "delta"), SETTINGS)
def test_noise_is_what_the_bound_on_the_loss_needs_and_little_more(strength, n, epsilon, delta):
    made = training(strength, n, epsilon=epsilon, delta=delta)
    assert 0.55 * delta < divergence(made, n) < delta
    for smaller in ({"linear_scale": 0.9}, {"output_scale": 0.5}):
        plan = made.plan._replace(**{k: v * getattr(made.plan, k) for k, v in smaller.items()})
        moved = changed(made, plan=plan)
        assert divergence(moved, n) > divergence(made, n)
    half = made.plan._replace(
        linear_scale=made.plan.linear_scale / 2, output_scale=made.plan.output_scale / 2
    )
    assert divergence(changed(made, plan=half), n) > delta


def test_what_is_drawn_is_as_wide_and_as_fine_as_is_charged():
    @jax.jit
    def fit(calibration):
        return calibration.fit(GAUSSIAN.lattice, np.dtype(np.float32))

    for sigma, d in ((0.5, 1), (7.7, 20), (3e4, 2000), (1e6, 5)):
        plan = training().plan._replace(linear_scale=sigma)
        calibration, _ = plans.calibrations(plan, d, np.dtype(np.float32))
        found, grid = fit(calibration), plans._grid(sigma, d)
        assert 2.0 ** int(found.exponent) <= grid
        assert sigma <= found.scale
        # B, for noise of length sqrt(d) and t.
        t = np.sqrt(-2 * np.log(1e-6 * 1e-5))
        assert float(found.scale) * (np.sqrt(d) + t) + 2 <= plans._longest(sigma, d, 1e-5)


def log_density(at, fixed, row, *, n, strength, sigma):
    """Of the exact minimizer in the plane: n - 1 records at `fixed`, and one at `row`."""
    b, (xx, xy, yy) = -n * strength * at, n * strength * np.array([1.0, 0.0, 1.0])
    for record, times in ((fixed, n - 1), (row, 1)):
        wrong = special.expit(-(at @ record))
        b = b + times * wrong[..., None] * record
        curvature = times * wrong * (1 - wrong)
        xx = xx + curvature * record[0] ** 2
        xy = xy + curvature * record[0] * record[1]
        yy = yy + curvature * record[1] ** 2
    quadratic = -np.sum(b**2, axis=-1) / (2 * sigma**2)
    return quadratic - np.log(2 * np.pi * sigma**2) + np.log(xx * yy - xy**2)


def exact_divergence(fixed, row, other, *, n, strength, epsilon, sigma):
    """Between the exact minimizers of neighbors, by integration of their densities."""
    length = np.sqrt(np.sum(fixed**2))
    m = np.linspace(-60, 60, 20_001)
    slope = n * strength * m / max(length, 1e-9) - n * special.expit(-m) * length
    mode = m[np.argmin(np.abs(slope))] / max(length, 1e-9) ** 2 * fixed
    reach = 7.5 * (sigma + 1) / (n * strength)
    steps = np.linspace(-reach, reach, 101)
    at = mode + np.stack(np.meshgrid(steps, steps), axis=-1)
    p, q = (log_density(at, fixed, r, n=n, strength=strength, sigma=sigma) for r in (row, other))
    area = (steps[1] - steps[0]) ** 2
    assert abs(np.sum(np.exp(p)) * area - 1) < 0.01
    return np.sum(np.maximum(np.exp(p) - np.exp(epsilon + q), 0)) * area


def unit_vector(angle):
    return np.array([np.cos(angle), np.sin(angle)])


def worst(scale, *, strength, n, epsilon, sigma):
    """The largest divergence that a random search finds, with the noise scaled."""
    generator, best, found = np.random.default_rng(0), None, 0.0
    for trial in range(80):
        if trial < 40:
            angles, length = generator.uniform(-np.pi, np.pi, 2), generator.uniform(0, 1)
        else:
            angles = best[0] + generator.normal(size=2) * 0.3
            length = np.clip(best[1] + generator.normal() * 0.1, 0, 1)
        at = exact_divergence(
            length * unit_vector(0.0),
            unit_vector(angles[0]),
            unit_vector(angles[1]),
            n=n,
            strength=strength,
            epsilon=epsilon,
            sigma=scale * sigma,
        )
        if at > found:
            best, found = (angles, length), at
    return found


@pytest.mark.parametrize(("strength", "n"), [(0.02, 2000), (1.0, 100), (0.3, 2)])
def test_no_neighbors_that_a_search_finds_exceed_delta(strength, n):
    epsilon, delta = 1.0, 0.02
    made = training(strength, n, 2, epsilon, delta)
    options = {"strength": strength, "n": n, "epsilon": epsilon}
    sigma = float(made.plan.linear_scale)
    assert 0 < worst(1.0, **options, sigma=sigma) < delta
    assert worst(0.3, **options, sigma=sigma) > delta


def problem(seed, strength, pull):
    """Rows of a problem where many margins are far from 0, and a linear term."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(N, D))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[: N // 2] = rows[0]
    linear = generator.normal(size=D)
    return rows.astype(np.float32), (pull * linear / np.linalg.norm(linear)).astype(np.float32)


def exact_minimizer(rows, linear, strength):
    """By Newton steps with backtracking, in float64."""
    rows, linear, w = rows.astype(float), linear.astype(float), np.zeros(D)

    def objective(w):
        losses = np.logaddexp(0, -rows @ w)
        return np.mean(losses) + strength / 2 * w @ w + linear @ w

    for _ in range(100):
        wrong = special.expit(-rows @ w)
        gradient = strength * w - wrong @ rows / N + linear
        hessian = (rows.T * wrong * (1 - wrong)) @ rows / N + strength * np.eye(D)
        step = np.linalg.solve(hessian, gradient)
        while objective(w - step) > objective(w) + 1e-15:
            step = step / 2
        w = w - step
    assert np.linalg.norm(gradient) < 1e-9
    return w


@pytest.mark.parametrize("newton_steps", [30, 0])
def test_solutions_are_as_exact_as_is_charged_whatever_newtons_steps_find(
    newton_steps, monkeypatch
):
    monkeypatch.setattr(solver, "_NEWTON_STEPS", newton_steps)
    eps = float(np.finfo(np.float32).eps)
    # A function of its own: a program that was traced before has the steps of before.
    find = jax.jit(lambda *problem: solver.perturbed_minimizer(*problem))
    for seed, (strength, pull) in enumerate([(0.1, 0.5), (0.005, 0.0), (0.005, 2.0), (2.0, 9.0)]):
        strength = float(np.float32(strength))
        rows, linear = problem(seed, strength, pull)
        plan, charged = solver.solver_plan(strength, pull=pull * (1 + 1e-6), d=D, eps=eps)
        found = np.asarray(find(rows, linear, strength, plan), float)
        exact = exact_minimizer(rows, linear, strength)
        assert np.linalg.norm(exact) <= plan.radius
        assert np.linalg.norm(found - exact) <= charged
        assert charged < 0.01 * plan.radius


@pytest.mark.parametrize("eps", [2.0**-23, 2.0**-52])
@pytest.mark.parametrize("strength", [2.0**20, 2.0, 0.1, 1e-3])
def test_a_point_with_a_gradient_that_is_short_enough_is_within_the_error(strength, eps):
    """Its gradient is off by a quarter of that at most: by convexity it is 5 e / lambda away.

    What else ends the solver: its last step, after which 2 e and the rounding of a step are left.
    """
    for d, pull in ((1, 0.0), (3, 2.0), (50, 0.1)):
        plan, charged = solver.solver_plan(strength, pull=pull, d=d, eps=eps)
        error = eps * ((d + 1) * plan.radius / 4 + 12 + d / 8 + 6 * pull)
        assert plan.enough == pytest.approx(4 * error, rel=1e-14)
        assert charged >= (plan.enough + error) / strength
        # The rounding of a step.
        step = eps * float(plan.radius) * (d / 2 + 8) + eps * (1 + pull) / strength
        assert charged >= (2 * error + (strength + 0.25) * step) / strength
        assert charged <= (5 * error + (strength + 0.25) * step) / strength + step


def test_the_solver_may_stop_where_its_gradient_is_short_enough(monkeypatch):
    """At once, at 0, from which the minimizer is nearly 4 e / lambda away."""
    monkeypatch.setattr(solver, "_NEWTON_STEPS", 0)
    eps, strength = float(np.finfo(np.float32).eps), 64.0
    plan, charged = solver.solver_plan(strength, pull=1e-3, d=D, eps=eps)
    linear = np.array([0.999 * plan.enough, 0, 0], np.float32)
    rows = np.zeros((N, D), np.float32)
    find = jax.jit(lambda *problem: solver.perturbed_minimizer(*problem))
    assert np.all(np.asarray(find(rows, linear, strength, plan)) == 0)
    away = np.linalg.norm(exact_minimizer(rows, linear, strength))
    assert away == pytest.approx(0.999 * plan.enough / strength, rel=1e-6)
    assert away <= charged


@pytest.mark.parametrize("d", [1, 10**3, 10**9])
@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-9), (1.0, 1e-5), (8.0, 0.2), (20.0, 1e-16)]
)
def test_the_tables_of_both_noises_are_charged(epsilon, delta, d):
    """Ratios of densities within e^loss but for a mass: twice the loss, and its share of delta.

    What else is charged there: noise that is longer than B, with probability delta / 10^6.
    """
    certificate = GAUSSIAN.lattice.certificate
    loss, missed = 2 * d * certificate.loss, 2 * d * certificate.delta
    left_epsilon, left_delta = plans._left_by_tables(epsilon, delta, d)
    assert np.isclose(left_epsilon + 2 * loss, epsilon, rtol=1e-15, atol=0)
    spent = np.exp(loss) * left_delta + (1 + np.exp(left_epsilon + loss)) * missed
    assert delta * (1 - 2e-6) < spent + 1e-6 * delta <= delta
    if d == 10**9:
        assert epsilon - left_epsilon > 1e-5


def test_newtons_steps_end_however_far_noise_pulls():
    """Where they did not, as many steps as the plan allows followed: hours, for a small lambda."""
    eps, find = float(np.finfo(np.float32).eps), jax.jit(solver.perturbed_minimizer)
    mostly_one = np.zeros((N, D), np.float32)
    mostly_one[:, 0] = np.where(np.arange(N) % 2, 1, -1)
    mostly_one[:2] = [[0, 1, 0], [0, 0.8, 0.6]]
    one_direction = np.tile(np.eye(D, dtype="float32")[1], (N, 1))
    strength = float(np.float32(1e-4))
    for rows in (mostly_one, one_direction, 1e-3 * one_direction, problem(0, 0.1, 1.0)[0]):
        for linear in ([0.01, 0.1, -0.03], [0.0, -0.1, 0.0], [1.0, 3.0, -2.0]):
            linear = np.array(linear, np.float32)
            pull = float(np.linalg.norm(linear)) * (1 + 1e-6)
            plan, _ = solver.solver_plan(strength, pull=pull, d=D, eps=eps)
            found = np.asarray(find(rows, linear, strength, plan._replace(most_steps=0.0)), float)
            gradient = strength * found - special.expit(-rows @ found) @ rows / N + linear
            assert np.linalg.norm(gradient) <= 1.5 * plan.enough


@pytest.fixture(scope="module")
def release_many(keys):
    """Releases of a plan, many at once: `release_many(made, database)`."""
    many = jax.random.split(keys(7), 2000)

    @jax.jit
    def release(made, database):
        return jax.vmap(lambda key: made(key, database).value)(many)

    return lambda made, database: np.asarray(release(made, database), float)


def with_scales(made, linear, output):
    return changed(
        made, plan=made.plan._replace(linear_scale=linear, output_scale=output, error=output / 8)
    )


NOTHING = {"x": np.zeros((N, D), np.float32), "y": np.zeros(N, np.float32)}
SOME = {
    "x": problem(0, 0.1, 1.0)[0],
    "y": np.sign(problem(0, 0.1, 1.0)[0][:, 0]),
}


def test_noise_has_the_scales_that_were_planned(release_many):
    """Variances of 6000 normals are off by 10% with probability 5e-8."""
    made = training(0.5)
    tiny = 1e-6
    # Without features the minimizer is -b / (n lambda).
    linear = release_many(with_scales(made, 3.0, tiny), NOTHING) * N * 0.5
    assert 0.9 < np.var(linear) / 3.0**2 < 1.1
    output = release_many(with_scales(made, tiny, 0.1), NOTHING)
    assert 0.9 < np.var(output) / 0.1**2 < 1.1
    for drawn in (linear, output):
        assert stats.kstest(drawn.ravel() / np.std(drawn), "norm").pvalue > 1e-6
    # Each by a key of its own: a correlation of 5 / sqrt(6000) has probability 6e-7.
    assert abs(np.corrcoef(linear.ravel(), output.ravel())[0, 1]) < 5 / np.sqrt(linear.size)


def test_without_noise_it_is_the_minimizer(release_many):
    made = training(0.1)
    released = release_many(with_scales(made, 1e-6, 1e-6), SOME)
    signs = np.where(SOME["y"] > 0, 1.0, -1.0)[:, None]
    exact = exact_minimizer(SOME["x"] * signs, np.zeros(D), made.regularization)
    np.testing.assert_allclose(released, np.broadcast_to(exact, released.shape), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -3e38])
def test_no_record_decides_whether_a_release_happens(bad, release_many):
    x = SOME["x"].copy()
    x[1] = bad
    assert np.all(np.isfinite(release_many(training(0.1), {**SOME, "x": x})))


def test_a_ledger_hears_of_a_release(keys, tmp_path, monkeypatch):
    made = training(0.5)
    monkeypatch.setattr(mechanism, "_released", lambda *_: np.zeros(D))
    with dpjax.random.KeyLedger(tmp_path / "keys"):
        made(keys(1), NOTHING)
        with pytest.raises(ValueError, match="key"):
            made(keys(1), NOTHING)


def test_what_is_refused(keys):
    with pytest.raises(ValueError, match=r"regularization must be above 0\.1"):
        training(0.01, 10, epsilon=0.2)
    with pytest.raises(ValueError, match="regularization must be from"):
        training(2.0**65)
    with pytest.raises(ValueError, match="delta=1e-35 is too small"):
        training(delta=1e-35)
    with pytest.raises(ValueError, match="regularization must be from"):
        training(1e-6, 10**7)
    with pytest.raises(ValueError, match=r"regularization=1e-09 is too small: .* steps"):
        plans.perturbation_plan(
            1e-9, n=10**10, d=2, epsilon=1.0, delta=1e-5, dtype=np.dtype("float64")
        )
    made = training()
    with pytest.raises(ValueError, match="database must be arrays of shapes"):
        made(keys(0), {**NOTHING, "x": np.zeros((N, D + 1))})
    with pytest.raises(ValueError, match="must be a single training"):
        jax.tree.map(lambda leaf: np.full(3, leaf), made)(keys(0), NOTHING)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), NOTHING)
    with pytest.raises(ValueError, match="split the key"):
        jax.vmap(lambda database: made(keys(0), database).value)(stacked)
    with pytest.raises(TypeError, match="several trainings"):
        jax.jit(lambda epsilon: training(epsilon=epsilon))(1.0)
    with jax.enable_x64(True):
        wide = training(dtype="float64")
    assert wide.plan.error < 0.1 * made.plan.error
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="jax_enable_x64"):
            wide(keys(0), NOTHING)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            training(dtype="float64")


def test_noise_that_no_grid_can_hold_is_refused():
    with pytest.raises(ValueError, match="no grid of float32 can hold the noise at epsilon=1e-08"):
        training(2.0**60, 10, epsilon=1e-8, delta=1e-9)


def test_the_largest_lambda_is_carried():
    """One at which lambda + 1/4 is lambda."""
    plan = training(2.0**64).plan
    assert plan.solver.most_steps == 1
    assert 0 < plan.error < plan.solver.radius < 2.0**-62


@pytest.mark.slow
def test_another_epsilon_or_lambda_shares_the_program(keys, compilations):
    training(0.1)(keys(0), NOTHING)
    assert compilations(lambda: training(0.2, epsilon=2.0)(keys(1), NOTHING).value) == []


@pytest.mark.slow
def test_float64_takes_features_of_any_kind(keys, x64):
    made = with_scales(training(0.1, dtype="float64"), 1e-9, 1e-9)
    x = np.random.default_rng(0).integers(-1, 2, size=(N, D))
    released = made(keys(0), {**SOME, "x": x}).value
    assert released.dtype == "float64"
    rows = np.where(SOME["y"] > 0, 1.0, -1.0)[:, None] * x
    rows = rows / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    np.testing.assert_allclose(
        released, exact_minimizer(rows, np.zeros(D), made.regularization), atol=1e-8
    )


@pytest.mark.slow
def test_the_auditor_refutes_a_quarter_of_the_noise_and_not_all_of_it(keys):
    """Neighbors that differ in one of eight records; the limits hold with probability .95."""
    n, strength = 8, 0.5
    made = training(strength, n, 1, 1.0, 0.01)
    x = np.ones((n, 1), np.float32)
    value = {"x": x, "y": np.ones(n, np.float32)}
    neighbor = {"x": x, "y": np.r_[-np.ones(1), np.ones(n - 1)].astype(np.float32)}
    for parts, refuted in ((1, False), (4, True)):
        plan = made.plan._replace(
            linear_scale=made.plan.linear_scale / parts, output_scale=made.plan.output_scale / parts
        )
        tried = changed(made, plan=plan)
        result = dpjax.auditing.audit(
            keys(3), tried, value=value, neighbor=neighbor, delta=0.01, samples=40_000
        )
        assert (result.epsilon > 1.0) == refuted
