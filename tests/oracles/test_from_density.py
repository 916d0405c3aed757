"""Records by a density: which one is drawn, its log density, and what is refused.

Statistical tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.oracles import from_density

FALSE_ALARM = 1e-6


def wave(points):
    """Negative on parts of the square."""
    return jnp.sin(5 * points[..., 0]) + points[..., 1]


def masses(cells):
    """Of the cells of the square under `wave`, by their centers."""
    axis = (np.arange(cells) + 0.5) / cells
    density = np.maximum(np.sin(5 * axis)[:, None] + axis[None, :], 0)
    return density / density.sum()


@pytest.fixture(scope="module")
def oracle():
    return from_density(wave, dims=2, cells=16)


def test_points_follow_the_density(oracle, key):
    drawn = np.asarray(jax.jit(oracle, static_argnums=1)(key, 60_000), float)
    assert drawn.shape == (60_000, 2)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    cell = np.floor(16 * drawn).astype(int)
    counts, expected = np.zeros((16, 16)), masses(16)
    np.add.at(counts, tuple(cell.T), 1)
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    assert (60_000 * expected[seen]).min() > 5  # Enough for the test.
    assert stats.chisquare(counts[seen], 60_000 * expected[seen]).pvalue > FALSE_ALARM
    uniform = np.full(seen.sum(), 60_000 / seen.sum())
    assert stats.chisquare(counts[seen], uniform).pvalue < FALSE_ALARM
    left = cell[:, 0] < np.median(cell[:, 0])  # In which cell says nothing of where in it.
    for inside in (*(16 * drawn - cell).T, *(16 * drawn - cell)[left].T):
        assert stats.kstest(inside, "uniform", method="asymp").pvalue > FALSE_ALARM
        assert stats.kstest(inside**1.1, "uniform", method="asymp").pvalue < FALSE_ALARM


def test_log_density_is_what_is_drawn_from(oracle):
    axis = (np.arange(16) + 0.25) / 16
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    log_prob = jax.jit(jax.vmap(oracle.log_prob))
    density = np.exp(np.asarray(log_prob(points.astype("float32")), float))
    assert density.mean() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(density.reshape(16, 16), 256 * masses(16), rtol=1e-4)
    outside = np.array([[-0.1, 0.5], [0.5, 1.1], [np.nan, 0.5]] * 86, "float32")[: len(points)]
    assert np.isneginf(log_prob(outside)).all()
    assert oracle.log_prob([0.1, 1.0]) == oracle.log_prob([0.1, 0.99])


@pytest.mark.parametrize("cells", [1, 2**16])
def test_coordinates_are_even_multiples_in_any_cell(cells, key):
    """Of 2^-24, in cells as wide as the cube and as narrow as they may be."""
    oracle = from_density(lambda x: jnp.ones(x.shape[:-1]), dims=1, cells=cells)
    drawn = np.asarray(jax.jit(oracle, static_argnums=1)(key, 5_000), float)[:, 0]
    assert (drawn * 2**24 % 1 == 0).all()
    assert (drawn * 2**24 % 2 == 1).mean() == pytest.approx(0.5, abs=0.04)
    assert stats.kstest(drawn, "uniform", method="asymp").pvalue > FALSE_ALARM


def test_a_released_density_is_an_oracle(keys):
    """The proposal of the paper: noise of scale 1 leaves it negative at one end."""
    lattice = jnp.array([0.0, 1.0, 2.0, 1.0, 0.0])
    released = dpjax.bernstein(0.2, 1.0, degree=4, dims=1)(keys(1), lattice).value
    axis = ((np.arange(16_384) + 0.5) / 16_384).astype("float32")
    values = np.asarray(released(axis[:, None]), float)
    assert values.min() < 0 < values.max()
    oracle = from_density(released, dims=1)
    assert oracle.log_densities.shape == (16_384,)
    expected = np.maximum(values, 0) / np.maximum(values, 0).mean()
    np.testing.assert_allclose(np.exp(oracle.log_densities), expected, rtol=1e-3, atol=1e-4)


def test_cells_by_default():
    ones = lambda x: jnp.ones(x.shape[:-1])  # noqa: E731
    shapes = [from_density(ones, dims=dims).log_densities.shape for dims in (1, 2, 3)]
    assert shapes == [(16_384,), (128, 128), (16, 16, 16)]


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda x: -x[..., 0], "above 0 at the center of some cell"),
        (lambda x: x[..., 0] / 0, "density must be finite"),
        (lambda x: x, r"took \(4, 1\) to \(4, 1\)"),
    ],
)
def test_bad_densities_are_refused(density, message):
    with pytest.raises(ValueError, match=message):
        from_density(density, dims=1, cells=4)


@pytest.mark.parametrize("cells", [0, 3, 2**17, 2**12])
def test_bad_numbers_of_cells_are_refused(cells):
    with pytest.raises(ValueError, match="cells must be"):
        from_density(wave, dims=2, cells=cells)


def test_fitting_in_a_traced_program_is_refused():
    with pytest.raises(TypeError, match="from_density runs on the host"):
        jax.jit(lambda a: from_density(lambda x: a * x[..., 0], dims=1).log_densities)(1.0)
