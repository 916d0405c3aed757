"""What probes refuse, and what they add to the estimate."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

import dpjax
from dpjax._running import _progress
from dpjax.random._keys import sampling_key
from dpjax.sensitivity import _loop, _probes
from dpjax.sensitivity._pairs import RandomPair, random_rotations

SETTINGS = {"n": 20, "norm": "l1", "gamma": 0.05, "m": 300}


def with_rule(single, batched):
    """A target that computes different values for many databases at once."""
    return ruled(single, lambda size, mapped, databases: (jax.vmap(batched)(databases), True))


def ruled(single, rule):
    rule.__module__ = "dpjax"  # Rules of users are left out.
    target = custom_vmap(lambda database: single(database))
    target.def_vmap(rule)
    return target


def test_a_rule_that_computes_something_else_is_refused(key, uniform):
    target = with_rule(jnp.sum, jnp.mean)
    with pytest.raises(ValueError, match="different values for many databases at once"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)


@pytest.mark.parametrize("positions", ["average", "each"])
def test_it_is_refused_for_records_that_count_by_position(key, uniform, positions):
    target = with_rule(jnp.sum, jnp.mean)
    with pytest.raises(ValueError, match="different values for many databases at once"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS | {"positions": positions})


def test_a_rule_that_errs_on_few_databases_is_refused(key, uniform):
    """On 1 of 42: with this key on 5 of the 100 databases, and on none of the first eight."""
    target = with_rule(jnp.sum, lambda d: jnp.sum(d) * jnp.where(jnp.min(d) > 0.17, 0.9, 1))
    with pytest.raises(ValueError, match="different values for many databases at once"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)


def test_a_rule_is_run_on_as_many_databases_as_in_a_chunk(key, uniform):
    def rule(axis_size, mapped, databases):
        sums = jnp.sum(databases, axis=1)
        return sums / 10 if axis_size == 256 else sums, True

    target = ruled(jnp.sum, rule)
    with pytest.raises(ValueError, match="different values for many databases at once"):
        dpjax.sample_sensitivity(key, target, uniform, chunk_size=256, **SETTINGS)


def test_rules_that_nothing_is_compared_with_are_refused(key, uniform):
    """A norm and an oracle are run by the sampler alone, in batches."""
    norm = with_rule(lambda x: jnp.sum(jnp.abs(x)), lambda x: jnp.sum(jnp.abs(x)) / 10)
    with pytest.raises(ValueError, match="norm must not call what dpjax computes"):
        dpjax.sample_sensitivity(key, jnp.sum, uniform, **SETTINGS | {"norm": norm})
    oracle = with_rule(lambda key: uniform(key, 21), lambda key: uniform(key, 21) / 10)
    with pytest.raises(ValueError, match="oracle must not call what dpjax computes"):
        dpjax.sample_sensitivity(key, jnp.sum, lambda key, n: oracle(key), **SETTINGS)


def test_a_rule_that_agrees_is_accepted(key, uniform):
    # Another program than that of the tests above, whose rule would be taken for this one.
    target = lambda database: jnp.sum(database / 2)  # noqa: E731
    plain = dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)
    own = dpjax.sample_sensitivity(key, with_rule(target, target), uniform, **SETTINGS)
    np.testing.assert_allclose(own.value, plain.value, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_what_is_not_finite_alone_and_in_a_batch_agrees(key, uniform, bad, monkeypatch):
    """NaN agrees with NaN: whether it is private is for the distances to say.

    A third of the databases has one, and the test sees that probes are among them.
    """
    seen, compared = [], _probes._equal

    def equal(x, y):
        seen.append((x, y, compared(x, y)))
        return np.ones(np.shape(x), bool)

    monkeypatch.setattr(_probes, "_equal", equal)
    target = lambda d: jnp.where(jnp.max(d) > 0.98, bad, jnp.sum(d))  # noqa: E731
    settings = SETTINGS | {"gamma": 0.6}
    assert dpjax.sample_sensitivity(key, target, uniform, **settings).value < 2
    *_, (batched, alone, found) = seen
    assert np.all(found[~np.isfinite(alone)])
    assert 0 < np.sum(~np.isfinite(alone)) < alone.size
    np.testing.assert_array_equal(np.isfinite(batched), np.isfinite(alone))


def test_a_value_that_only_a_batch_has_is_refused(key, uniform):
    target = with_rule(lambda d: jnp.sum(d) * jnp.nan, jnp.sum)
    with pytest.raises(ValueError, match="different values for many databases at once"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)


def test_rounding_alone_is_added_to_the_estimate(key, uniform):
    """A release of one database in another rounding than the batch's raises the estimate by it."""
    off = 2.0**-12
    exact = dpjax.sample_sensitivity(key, jnp.max, uniform, **SETTINGS)
    apart = with_rule(jnp.max, lambda d: jnp.max(d) * (1 - off))
    raised = dpjax.sample_sensitivity(key, apart, uniform, **SETTINGS)
    assert 1.8 * off < raised.value - exact.value * (1 - off) < 2.2 * off


def test_both_databases_of_a_pair_may_be_off(key, uniform):
    """Here the batch brings the two values that there are nearer, from both sides."""
    single = lambda d: jnp.round(d[-1])  # noqa: E731
    target = with_rule(single, lambda d: jnp.clip(single(d), 1 / 300, 1 - 1 / 300))
    settings = SETTINGS | {"positions": "each", "n": 2, "gamma": 0.2}
    assert dpjax.sample_sensitivity(key, target, uniform, **settings).value >= 1 - 1e-6


class Rests:
    """An array that is never ready."""

    def is_ready(self):
        return False


def test_a_process_that_has_come_to_rest_is_given_up(monkeypatch, uniform):
    target = lambda d: jnp.linalg.solve(jnp.eye(2), d[:2])  # noqa: E731
    sampler = RandomPair.trace(jax.random.key(0), target, uniform, n=2, norm="l1", positions="last")
    monkeypatch.setattr(_progress.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(_progress.time, "process_time", lambda: 0.0)
    with pytest.raises(_progress.NoAnswerError, match=r"lu, triangular_solve.*NPROC=64"):
        _progress.wait_for(Rests(), sampler.programs, None)


def test_a_process_that_computes_is_waited_for(monkeypatch, uniform):
    sampler = RandomPair.trace(
        jax.random.key(0), jnp.max, uniform, n=2, norm="l1", positions="last"
    )
    naps, seconds = [], iter(range(10**6))
    monkeypatch.setattr(_progress.time, "sleep", naps.append)
    monkeypatch.setattr(_progress.time, "process_time", lambda: float(next(seconds)))

    class Slow:
        def is_ready(self):
            return len(naps) > 5 * _progress._PATIENCE

        def block_until_ready(self):
            return self

    _progress.wait_for(Slow(), sampler.programs, None)
    assert max(naps) <= _progress._LONGEST_NAP


def rotations(n, count):
    """What probes rotate databases of n records by."""
    return random_rotations(np.asarray(jax.random.key_data(jax.random.key(5))), n, count)


def test_rotations_are_drawn_uniformly_and_move_every_record():
    """By chance in 10^-9 for n = 7; for n = 2 half of the rotations would be by none."""
    assert set(rotations(2, 500)) == {1}
    found = np.bincount(rotations(7, 6000), minlength=7)
    assert found[0] == 0
    assert len(found) == 7
    assert np.sum((found[1:] - 1000) ** 2 / 1000) < 55  # 5 degrees of freedom
    # Long ones are as likely as short ones, whatever the number of probes.
    assert np.median(rotations(10**6, 32)) > 10**5


def test_what_moves_under_few_rotations_moves_under_each_on_few_databases():
    """docs/proofs/shorter.md, for every function of up to five rotated databases.

    What it is for one orbit it is for all, since both shares are averages over orbits.
    """
    for n in (2, 3, 4, 5):
        for values in itertools.product(range(3), repeat=n):
            # Row i, column r: how far rotation r moves the value, with the rotation by none.
            moves = np.array(
                [[abs(values[i] - values[(i + r) % n]) for r in range(n)] for i in range(n)]
            )
            for t in (0, 0.5, 1):
                assert (moves > 2 * t).mean(axis=0).max() <= 2 * (moves > t).mean()


class Exactly:
    """All pairs of two records: f as a matrix, and the probabilities of the letters of a record."""

    def __init__(self, f, p):
        self.f, self.p = np.asarray(f, float), np.asarray(p, float)
        self.p = self.p / self.p.sum()

    def share_at(self, position, threshold):
        """The share of pairs that differ at a position and move by more than a threshold."""
        f = self.f if position == 1 else self.f.T
        weights = np.einsum("i,j,k->ijk", self.p, self.p, self.p)
        return float(weights[np.abs(f[:, :, None] - f[:, None, :]) > threshold].sum())

    def rotated(self, threshold):
        """The share of databases that a uniform rotation moves by more than a threshold."""
        moves = np.abs(self.f - self.f.T) > threshold
        return float(np.outer(self.p, self.p)[moves].sum() / 2)


FIXED = Exactly([[1, 1, 0], [1, 1, 1], [0, 0, 0]], [0.549, 0.251, 0.2])
HALF = Exactly(
    [[-33, 0, 1, 2], [-2, -3, -4, -3], [3, -6, -40, 3], [1, -1, 1, -1]],
    [0.1772, 0.3378, 0.2821, 0.2029],
)


def test_a_record_at_another_position_is_left_uncovered_by_so_much_more():
    """docs/proofs/sampled-sensitivity.md, on 3,000 random targets of two records.

    Of what is added, a half counts at a uniform position, and a quarter at a fixed one.
    """
    rng = np.random.default_rng(3)
    drawn = []
    for _ in range(3000):
        letters = rng.integers(2, 6)
        f = rng.integers(-3, 4, (letters, letters))
        f = f + f.T if rng.random() < 0.5 else f
        f[rng.integers(letters), rng.integers(letters)] += rng.integers(-3, 4)
        drawn.append(Exactly(f, rng.dirichlet(np.ones(letters))))
    for case in (FIXED, HALF, *drawn):
        for estimate, added in itertools.product((0, 1, 2), (0, 1, 2, 4)):
            gamma = case.share_at(1, estimate)
            first = case.share_at(0, estimate + added)
            last = case.share_at(1, estimate + added)
            uniform = gamma + 2 * case.rotated(added / 2)
            assert (first + last) / 2 <= uniform + 1e-12
            assert max(first, last) <= gamma + 4 * case.rotated(added / 4) + 1e-12


def test_two_shares_are_too_few_at_a_fixed_position():
    gamma, share = FIXED.share_at(1, 0), FIXED.rotated(0)
    assert (round(gamma, 3), round(share, 4)) == (0.176, 0.0502)
    assert FIXED.share_at(0, 0) > 0.331 > 0.277 > gamma + 2 * share


def test_half_of_what_is_added_counts_and_not_all_of_it():
    """Both databases of a pair may move."""
    gamma, uniform = HALF.share_at(1, 2), (HALF.share_at(0, 4) + HALF.share_at(1, 4)) / 2
    assert HALF.rotated(2) == 0
    assert uniform > gamma + 0.08
    assert uniform <= gamma + 2 * HALF.rotated(1)


def test_twice_what_rotations_move_is_added(key, uniform):
    """The first record counts by 2^-10 more, and a rotation puts another one into its place."""
    off = 2.0**-10
    plain = dpjax.sample_sensitivity(key, jnp.sum, uniform, **SETTINGS)
    target = lambda d: jnp.sum(d) + off * d[0]  # noqa: E731
    found = dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)
    assert 1.5 * off < found.value - plain.value < 2.01 * off


@pytest.mark.parametrize("moves", ["order", "batch"])
def test_an_estimate_of_zero_is_of_a_value_that_nothing_moves(key, uniform, moves):
    """Nothing would be added to 0, so a release without noise would show the first record.

    What else reaches an estimate of 0 is a value that is another one in a batch than alone.
    """
    in_order = lambda d: 1e7 + 4 * d[0]  # noqa: E731
    in_batch = with_rule(lambda d: 1e7 + 0 * d[0], lambda d: 1e7 + 1 + 0 * d[0])
    settings = SETTINGS | {"allow_zero": True}
    with pytest.raises(ValueError, match=r"is 0, but the value of the target moves by up to"):
        dpjax.sample_sensitivity(
            key, {"order": in_order, "batch": in_batch}[moves], uniform, **settings
        )
    assert dpjax.sample_sensitivity(key, lambda d: 1e7 + 0 * d[0], uniform, **settings).value == 0


def test_an_order_that_long_rotations_show_is_refused(key):
    """Short rotations leave it as it is, on nearly all databases.

    Places are counted from the largest record; the last half from there has small weights, or the
    first half where the last place would be in it.
    """
    n = 20_000

    def oracle(key, n):
        first, second = jax.random.split(key)
        u = jax.random.uniform(first, (n,))
        return {"u": u, "v": jax.random.randint(second, (n,), 0, 100)}

    def target(database):
        first = jnp.argmax(database["u"])
        place = (jnp.arange(n) - first) % n
        near = jnp.where(first < n // 2, place >= n // 2, place < n // 2)
        return jnp.sum(database["v"] * jnp.where(near, 1, 100))

    with pytest.raises(ValueError, match="target depends on the order of the records"):
        dpjax.sample_sensitivity(key, target, oracle, n=n, norm="l1", gamma=0.2)


@pytest.fixture
def computed(monkeypatch):
    """The chunks that are computed, in order."""
    chunks, compute = [], _loop.compute_chunks

    def logged(block, key, position, steps, **settings):
        chunks.extend(steps)
        return compute(block, key, position, steps, **settings)

    monkeypatch.setattr(_loop, "compute_chunks", logged)
    return chunks


def test_an_order_that_few_databases_show_is_refused_before_the_rest_is_drawn(
    key, uniform, computed
):
    """On 1 of 42: with this key on none of the first ten databases, and on some of the 100."""
    target = lambda d: jnp.max(d) + jnp.where(jnp.min(d) > 0.17, d[-1], 0)  # noqa: E731
    own = sampling_key(key)
    first = jax.vmap(lambda i: uniform(jax.random.fold_in(own, i), 21)[:-1])(np.arange(100))
    shows = np.min(first, axis=1) > 0.17
    assert shows.any()
    assert not shows[:10].any()
    with pytest.raises(ValueError, match="target depends on the order of the records"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS, chunk_size=10)
    assert computed == list(range(12))  # Two more were on their way.


def test_probed_pairs_have_the_distances_of_the_others(key, uniform):
    """They are the pairs of `sample_distances`, whatever number of them is probed."""
    settings = {"n": 20, "norm": "l1", "m": 300, "chunk_size": 10}
    distances = np.sort(dpjax.sample_distances(key, jnp.mean, uniform, **settings))
    for gamma in (0.05, 0.5):
        found = dpjax.sample_sensitivity(key, jnp.mean, uniform, **settings, gamma=gamma)
        np.testing.assert_allclose(found.value, distances[found.k - 1], rtol=1e-4)


def in_a_ring(database):
    """Ignores rotations; a reversal changes it, and nearly every exchange of two records."""
    return jnp.sum(database * jnp.roll(database, 1) ** 2)


def parity(database):
    """Ignores even permutations: whether records are sorted by an even number of exchanges."""
    larger = database[:, None] > database[None, :]
    return jnp.float32(jnp.sum(jnp.triu(larger)) % 2) + jnp.max(database)


@pytest.mark.parametrize("target", [in_a_ring, parity])
def test_what_rotations_do_not_change_treats_all_positions_alike(key, uniform, target):
    """It passes, and at each position at most a share gamma lies beyond the estimate.

    It does with confidence .99 for each; among 400 pairs, twice as many by chance in 10^-7.
    """
    n, gamma, pairs = 7, 0.1, 400
    found = dpjax.sample_sensitivity(key, target, uniform, n=n, norm="l1", gamma=gamma)
    records = jax.vmap(lambda i: uniform(jax.random.fold_in(jax.random.key(1), i), n + 1))(
        np.arange(pairs)
    )
    for position in range(n):
        neighbors = records[:, :n].at[:, position].set(records[:, n])
        moved = np.abs(jax.vmap(target)(records[:, :n]) - jax.vmap(target)(neighbors))
        assert np.mean(moved > found.value) <= 2 * gamma


def ranked(database):
    return jnp.sum(database * jnp.arange(1.0, len(database) + 1))


@pytest.mark.parametrize("target", [parity, pytest.param(ranked, marks=pytest.mark.slow)])
def test_what_a_rotation_changes_is_refused(key, uniform, target):
    """Rotations of an even number of records may be odd permutations."""
    with pytest.raises(ValueError, match="target depends on the order of the records"):
        dpjax.sample_sensitivity(key, target, uniform, **SETTINGS)


def test_probes_look_at_five_over_gamma_databases(uniform):
    sampler = RandomPair.trace(
        jax.random.key(0), jnp.max, uniform, n=2, norm="l1", positions="last"
    )
    counts = [
        _probes.probed_pairs(sampler, dpjax.operating_point(m=10**4, gamma=gamma))
        for gamma in (0.2, 0.05, 0.01)
    ]
    assert counts == [32, 100, 500]


def test_a_refused_order_names_the_other_causes():
    # A solver that stops early, most often one on the host, looks as if the order mattered.
    found = _probes.Findings(permuted=0.5, replaced=1.0)
    with pytest.raises(ValueError, match=r"or is not converged.*solver's tolerance.*tol="):
        _probes.rounding_of_releases(found, is_sum=False)
