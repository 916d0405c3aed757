"""The linear support vector machine: its optimality conditions, its bias, its bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import dpjax
from dpjax import targets


def two_gaussians(key, n, d=8):
    """The oracle of the paper's Section 6."""
    key_label, key_noise = jax.random.split(key)
    positive = jax.random.bernoulli(key_label, 0.5, (n,))
    x = jnp.where(positive, 0.2, 0.8)[:, None] + 0.1 * jax.random.normal(key_noise, (n, d))
    return {"x": x, "y": positive.astype(x.dtype)}


# Most tests share the shape of a database, so that they share compiled programs too.
N, D = 40, 3


def overlapping(seed):
    generator = np.random.default_rng(seed)
    y = generator.choice([-1.0, 1.0], size=N)
    x = np.clip(0.5 + 0.1 * y[:, None] + 0.2 * generator.normal(size=(N, D)), 0, 1)
    return {"x": x, "y": y}


def repeated(seed):
    """Ten records, a few times each, some with both labels."""
    some = overlapping(seed)
    rows = np.random.default_rng(seed).integers(0, 10, size=N)
    y = some["y"][rows]
    return {"x": some["x"][rows], "y": np.where(np.arange(N) % 7 == 0, -y, y)}


def on_device(records, dtype=None):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), records)


@functools.partial(jax.jit, static_argnames=("steps", "clip", "working_set"))
def fit(records, c, **options):
    return targets.linear_svm(regularization=1 / c, **options)(records)


def fitted(records, c):
    """Weights and bias: of many steps in float64."""
    steps = 30 if jax.config.jax_enable_x64 else 12
    model = fit(on_device(records), jnp.asarray(c), steps=steps)
    return np.asarray(model["w"]), float(model["b"])


def violation(records, c, w, b):
    """How far w is from a sum of hinges' slopes that the optimality conditions allow.

    Records beyond their margin have slope 0, those short of it C / n, and those on it any between;
    the slopes times the labels add up to 0 and make up w. Any such solution is a minimum.
    """
    x, y = records["x"], np.where(records["y"] > 0, 1.0, -1.0)
    missing = 1 - y * (x @ w + b)
    cap = c / len(y)
    columns = np.column_stack([x, np.ones(len(y))]) * y[:, None]
    rest = np.append(w, 0) - cap * columns[missing > 1e-7].sum(axis=0)
    on_margin = columns[np.abs(missing) <= 1e-7]
    if len(on_margin) == 0:
        return np.linalg.norm(rest)
    slopes = optimize.lsq_linear(on_margin.T, rest, bounds=(0, cap), tol=1e-14).x
    return np.linalg.norm(rest - slopes @ on_margin)


@pytest.mark.parametrize("c", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("make", [overlapping, repeated])
def test_optimality_conditions_hold(make, c, x64):
    for seed in range(10):
        records = make(seed)
        assert violation(records, c, *fitted(records, c)) < 1e-7


def test_the_check_of_the_optimality_conditions_sees_errors(x64):
    records = overlapping(0)
    w, b = fitted(records, 3.0)
    assert violation(records, 3.0, w + 1e-4, b) > 1e-5
    # No record is on its margin, or not the right ones.
    assert violation(records, 3.0, w, b + 0.1) > 1e-3


def formula(shift):
    products = np.arange(1, N + 1)[:, None] * np.arange(1, D + 1)[None, :]
    y = np.where(np.arange(N) % 2 == 0, 1.0, -1.0)
    return {
        "x": np.clip(0.5 + 0.3 * np.sin(1.7 * products**1.3) + shift * y[:, None], 0, 1),
        "y": y,
    }


# By scikit-learn 1.9.1: SVC(kernel="linear", C=c / 40, tol=1e-13).
RECORDED = [
    (
        0.1,
        0.5,
        [0.07019357979923026, 0.029039308646808835, 0.06860793319038144],
        -0.08190939454361784,
    ),  # 0 on the margin
    (
        0.1,
        10.0,
        [1.2188784095369312, 0.4282079272595307, 1.1891019860960845],
        -1.3852513395249844,
    ),  # 0 on the margin
    (
        0.3,
        200.0,
        [2.7349445136509183, 1.4199675581964626, 2.7282084648098124],
        -3.1591870155330923,
    ),  # 2 on the margin
]


@pytest.mark.parametrize(("shift", "c", "w", "b"), RECORDED)
def test_recorded_solutions_of_libsvm(shift, c, w, b, x64):
    found = np.append(*fitted(formula(shift), c))
    np.testing.assert_allclose(found, np.append(w, b), atol=1e-7)


def test_two_records(x64):
    """Apart by a gap of .5: w = 2 / gap, as far as C allows; b in the middle."""
    records = {"x": np.array([[0.25], [0.75]]), "y": np.array([-1, 1])}
    np.testing.assert_allclose(np.append(*fitted(records, 100.0)), [4, -2], atol=1e-8)
    # Both at the cap C / 2, so w = C gap / 2.
    np.testing.assert_allclose(np.append(*fitted(records, 1.0)), [0.25, -0.125], atol=1e-8)


def test_bias_is_the_middle_where_it_is_not_unique(x64):
    # Weights next to 0: the sum of hinges is flat between the thresholds of ranks p and p + 1.
    records = {"x": overlapping(0)["x"], "y": np.where(np.arange(N) < N / 2, 1, -1)}
    w, b = fitted(records, 0.01)
    thresholds = np.sort(records["y"] - records["x"] @ w)
    assert b == pytest.approx(thresholds[N // 2 - 1 : N // 2 + 1].mean(), abs=1e-12)
    assert thresholds[N // 2] - thresholds[N // 2 - 1] > 1


@pytest.mark.parametrize(("label", "bias"), [(1, 1.0), (0, -1.0), (-1, -1.0)])
@pytest.mark.parametrize("n", [1, N])
def test_one_class(label, bias, n):
    w, b = fitted({"x": overlapping(0)["x"][:n], "y": np.full(n, float(label))}, 3.0)
    np.testing.assert_array_equal(w, np.zeros(D))
    assert b == bias


@pytest.mark.parametrize(
    ("d", "count", "sensitivity"),
    [
        (8, 16, 0.008),
        pytest.param(8, 400, 0.008, marks=pytest.mark.slow),
        pytest.param(2, 100, 0.19, marks=pytest.mark.slow),
        pytest.param(64, 50, 0.022, marks=pytest.mark.slow),
    ],
)
def test_float32_is_solved_far_below_the_effect_of_a_record(d, count, sensitivity):
    keys = jax.random.split(jax.random.key(d), count)
    databases = jax.vmap(lambda key: two_gaussians(key, 1000, d))(keys)

    def solve(databases, **options):
        found = jax.jit(jax.vmap(targets.linear_svm(regularization=1 / 3, clip=False, **options)))(
            databases
        )
        assert found["w"].dtype == databases["x"].dtype
        return np.column_stack([found["w"], found["b"]]).astype(float)

    coarse = solve(databases)
    with jax.enable_x64(True):
        exact = solve(on_device(databases, "float64"), steps=20, working_set=None)
    assert np.abs(coarse - exact).sum(axis=1).max() < 0.01 * sensitivity


@pytest.mark.slow
def test_swapping_the_labels_changes_the_signs(x64):
    records = overlapping(1)
    w, b = fitted(records, 3.0)
    swapped = fitted({"x": records["x"], "y": -records["y"]}, 3.0)
    np.testing.assert_allclose(np.append(*swapped), -np.append(w, b), atol=1e-8)


@pytest.mark.slow
def test_shifting_the_features_shifts_the_bias(x64):
    records = overlapping(2)
    w, b = fitted(records, 3.0)
    shifted = on_device({"x": records["x"] - 7.0, "y": records["y"]})
    moved = fit(shifted, jnp.asarray(3.0), steps=30, clip=False)
    np.testing.assert_allclose(moved["w"], w, atol=1e-8)
    assert float(moved["b"]) == pytest.approx(b + 7 * w.sum(), abs=1e-8)


def test_order_of_records_does_not_matter():
    records = overlapping(3)
    order = np.random.default_rng(0).permutation(40)
    permuted = {name: x[order] for name, x in records.items()}
    np.testing.assert_allclose(
        np.append(*fitted(records, 3.0)), np.append(*fitted(permuted, 3.0)), atol=1e-5
    )


@pytest.mark.slow
def test_a_batch_is_a_loop():
    batch = [overlapping(seed) for seed in range(3)]
    stacked = on_device(jax.tree.map(lambda *x: np.stack(x), *batch))
    together = jax.jit(jax.vmap(targets.linear_svm(regularization=1 / 3)))(stacked)
    for i, records in enumerate(batch):
        w, b = fitted(records, 3.0)
        np.testing.assert_allclose(together["w"][i], w, atol=1e-5)
        np.testing.assert_allclose(together["b"][i], b, atol=1e-5)


@pytest.mark.slow
def test_features_are_brought_into_the_unit_interval():
    records = overlapping(4)
    wild, tame = (jax.tree.map(np.array, records) for _ in range(2))
    wild["x"][:4, 0] = [np.nan, np.inf, -np.inf, 1e30]
    tame["x"][:4, 0] = [0, 1, 0, 1]
    wild["y"][5], tame["y"][5] = np.nan, -1  # Not positive.
    np.testing.assert_array_equal(np.append(*fitted(wild, 3.0)), np.append(*fitted(tame, 3.0)))
    unclipped = fit(on_device(wild), jnp.asarray(3.0), clip=False)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(unclipped))


@pytest.mark.slow
def test_labels_are_positive_or_not():
    records = overlapping(5)
    other = {"x": records["x"], "y": np.where(records["y"] > 0, 0.5, 0.0)}
    plain = np.append(*fitted(records, 3.0))
    np.testing.assert_array_equal(plain, np.append(*fitted(other, 3.0)))
    # Another dtype is another program, which may round otherwise.
    boolean = {"x": jnp.asarray(records["x"]), "y": jnp.asarray(records["y"] > 0)}
    model = fit(boolean, jnp.asarray(3.0), steps=12)
    np.testing.assert_allclose(np.append(model["w"], model["b"]), plain, atol=1e-5)


def neighbors(solve, x, y):
    """l1 distances of weights, and of weights and biases, when the last record is replaced."""
    old, new = (solve({"x": jnp.delete(x, i, axis=0), "y": jnp.delete(y, i)}) for i in (-1, -2))
    weights = jnp.sum(jnp.abs(old["w"] - new["w"]))
    return weights, weights + jnp.abs(old["b"] - new["b"])


@pytest.mark.parametrize(
    ("n", "d", "c"),
    [
        (4, 2, 3.0),
        pytest.param(6, 20, 0.1, marks=pytest.mark.slow),
        pytest.param(1, 2, 3.0, marks=pytest.mark.slow),
        pytest.param(9, 3, 20.0, marks=pytest.mark.slow),
    ],
)
def test_global_bound_holds_on_corners_of_the_cube(n, d, c, x64):
    generator = np.random.default_rng(n)
    x = generator.integers(0, 2, size=(300, n + 1, d)).astype(float)
    y = generator.choice([-1.0, 1.0], size=(300, n + 1))
    x[:100] = (y[:100, :, None] > 0) + 0.0  # All that agree in one corner, but for the last.
    x[:50, -1] = 1 - x[:50, -1]
    solve = targets.linear_svm(regularization=1 / c, dims=d, steps=20)
    moved = jax.jit(jax.vmap(lambda x, y: neighbors(solve, x, y)))(jnp.asarray(x), jnp.asarray(y))
    weights, both = (float(jnp.max(distances)) for distances in moved)
    assert weights <= 2 * c * d / n + 1e-6
    assert both <= solve.sensitivity("l1", dtype="float64").value
    # A vote decides the bias, whatever the features.
    assert both >= 1


def test_bound_is_the_diameter_of_a_set_that_the_target_stays_in():
    strong = targets.linear_svm(regularization=100.0, dims=64)
    assert strong.sensitivity("l1").value == pytest.approx(2 + 4 * 0.32, rel=1e-4)
    weak = targets.linear_svm(regularization=1 / 3, dims=3)
    assert weak.sensitivity("l1").value == pytest.approx(2 + 4 * 3, rel=1e-5)
    assert weak.sensitivity("l1", dtype="float64").value > 14


@pytest.mark.parametrize("c", [3.0, 1e12])
def test_the_bound_does_not_depend_on_convergence(c):
    """One step from the start, and a C that float32 cannot follow."""
    records = on_device(repeated(0))
    model = fit(records, jnp.asarray(c), steps=1, working_set=8)
    longest = (targets.linear_svm(regularization=1 / c, dims=D).sensitivity("l1").value - 2) / 4
    assert np.abs(model["w"]).sum() <= longest
    assert abs(model["b"]) <= 1 + longest


@pytest.mark.slow
def test_sampled_sensitivity_of_the_paper_s_experiment(key):
    target = targets.linear_svm(regularization=1 / 3, clip=False)
    found = dpjax.sample_sensitivity(
        key, target, two_gaussians, n=1000, norm="l1", m=400, gamma=0.1, method="dkw"
    )
    assert 0.006 < found.value < 0.011


def test_model_is_released(key):
    target = targets.linear_svm(regularization=1 / 3, dims=D)
    private = dpjax.privatize(target, dpjax.laplace(target.sensitivity("l1", n=N), epsilon=1.0))
    value = private(key, overlapping(0)).value
    assert value["w"].shape == (D,)
    assert value["b"].shape == ()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="regularization must be"):
        targets.linear_svm(regularization=bad)
    with pytest.raises(ValueError, match="steps"):
        targets.linear_svm(regularization=1.0, steps=0)
    with pytest.raises(ValueError, match="working_set"):
        targets.linear_svm(regularization=1.0, working_set=0)
    with pytest.raises(ValueError, match="dims must be"):
        targets.linear_svm(regularization=1.0, dims=0)
