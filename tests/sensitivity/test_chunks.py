"""Chunks: how large they are, that they compile once, and that memory stays bounded."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._running import _devices
from dpjax._running._devices import Layout, actual, fitting, share_of_memory
from dpjax.auditing._profile_pairs import sampled_distances
from dpjax.sensitivity import _plan
from dpjax.sensitivity._chunks import bytes_of_a_chunk
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import pairs_in_a_chunk


@pytest.fixture
def size(key, uniform):
    """The chunk size for a mean of n records."""

    def size(m, *, n, target=jnp.mean, chunk_size=None, key=key, device=None):
        sampler = RandomPair.trace(key, target, uniform, n=n, norm="l1", positions="last")
        return pairs_in_a_chunk(sampler, m, chunk_size, device)

    return size


def test_a_chunk_fits_the_cache_of_a_cpu(size):
    if jax.default_backend() != "cpu":
        pytest.skip("on an accelerator memory decides")
    assert size(10**6, n=1000) == 512  # About 2 MiB of records, as measured for the design
    assert size(10**6, n=10**9) >= 1


def test_a_chunk_is_never_more_than_all_pairs(size):
    assert size(5, n=10) == size(5, n=10, chunk_size=100) == 5
    assert size(1, n=10) == 1


def test_a_chunk_depends_on_shapes_alone(size, keys):
    assert size(10**4, n=1000, key=keys(0)) == size(10**7, n=1000, key=keys(1))
    assert size(10**7, n=4000) < size(10**7, n=1000)


def test_little_of_the_last_chunk_is_padding(size):
    for m in (513, 900, 1025, 1500, 4603, 10**5):
        chunk = size(m, n=1000)
        assert chunk <= 512
        assert -(-m // chunk) == -(-m // 512)  # No more chunks than there must be,
        assert -(-m // chunk) * chunk - m <= m / 16  # and few sizes, each of which is a program.
        assert chunk % 16 == 0


def test_chunks_for_the_host_are_even(size):
    """Padding costs evaluations there: fewer than one for each chunk."""
    on_host = dpjax.targets.host(np.mean, output=jax.ShapeDtypeStruct((), np.float32))
    for m, chosen in ((900, None), (901, None), (10**5, None), (100, 64), (7, 3), (1, None)):
        chunk = size(m, n=4, target=on_host, chunk_size=chosen)
        chunks = -(-m // chunk)
        assert chunks * chunk - m < chunks
        assert chunk <= (chosen or max(64, -(-m // 16)))
        assert size(m, n=4, target=on_host, chunk_size=chunk) == chunk  # So a run can be repeated.
    assert size(100, n=4, chunk_size=64) == 64


def test_what_the_target_computes_counts_too(size):
    def pairwise(database):
        return jnp.abs(database[:, None] - database[None, :])

    many = size(10**6, n=1000)
    assert size(10**6, n=1000, target=lambda x: jnp.mean(jnp.sort(pairwise(x)))) < many
    # XLA keeps no array of these terms.
    assert size(10**6, n=1000, target=lambda x: jnp.mean(pairwise(x))) == many


def test_terms_that_two_sums_share_count(size):
    target = dpjax.targets.summable(lambda x: x * jnp.arange(64.0), lambda s: s * s[0])
    assert size(10**6, n=1000, target=target) == size(10**6, n=64 * 1000)
    assert size(10**6, n=1000, target=lambda x: target(x)) == size(10**6, n=1000)


def test_the_same_target_traced_anew_compiles_nothing(keys, uniform, compilations):
    traces = []

    def sample(key):
        def target(database):
            traces.append(None)
            return jnp.max(database) * 0.5

        sensitivity = dpjax.sample_sensitivity(
            key, target, uniform, n=4, norm="l1", m=100, chunk_size=25
        )
        return sensitivity.value

    sample(keys(0))
    assert len(traces) == 1  # Four chunks and the check of the order come from one trace.
    assert compilations(lambda: sample(keys(1))) == []
    assert len(traces) == 2


def test_pairs_of_a_target_that_spreads_itself_are_not_spread_too(key, uniform, monkeypatch):
    """XLA would end with an error about its own operations."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    spec = jax.sharding.PartitionSpec()
    spread = jax.shard_map(jnp.max, mesh=mesh, in_specs=spec, out_specs=spec)
    sample = functools.partial(dpjax.sample_distances, key, n=4, norm="l1", m=20)
    assert np.all(sample(spread, uniform) == sample(jnp.max, uniform))
    monkeypatch.setattr(_plan, "devices_of", lambda *_, **__: (None, None))
    with pytest.raises(ValueError, match=r"mesh must be None or one device .* jax\.shard_map"):
        sample(spread, uniform)


def test_a_chunk_takes_its_share_of_memory_at_most(key, uniform, compilations, monkeypatch):
    """By what the compiled program says: one more is compiled, and the bits stay."""

    def sample():
        return dpjax.sample_sensitivity(key, jnp.max, uniform, n=100, norm="l1", m=5000)

    whole = sample()
    monkeypatch.setattr(_plan, "share_of_memory", lambda devices: 50_000)
    found = []
    names = compilations(lambda: found.append(sample()))
    assert names.count("jit(_compiled_step)") == 1
    assert found[0].chunk_size < whole.chunk_size
    assert found[0].value == whole.value
    pair = RandomPair.trace(key, jnp.max, uniform, n=100, norm="l1", positions="last")
    layout = Layout((None,), 5000, found[0].chunk_size)
    spec = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    assert bytes_of_a_chunk(spec, layout=layout, pair=pair) <= 50_000
    assert compilations(sample) == []


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("fixed", [0, 900, 5000])
def test_chunks_shrink_until_one_fits(key, uniform, monkeypatch, fixed, on_host):
    """Also where most of the memory does not shrink with them; the least chunk may be too large."""

    def used(key, *, layout, pair, probing=None):
        return fixed + 10 * layout.size

    monkeypatch.setattr(_plan, "bytes_of_a_chunk", used)
    monkeypatch.setattr(_plan, "share_of_memory", lambda devices: 1000)
    mean = dpjax.targets.host(np.mean, output=jax.ShapeDtypeStruct((), np.float32))
    target = mean if on_host else jnp.mean
    pair = RandomPair.trace(key, target, uniform, n=4, norm="l1", positions="last")
    found = _plan.layout_that_fits(key, pair, Layout((None,), 5000, 1024))
    assert used(key, layout=found, pair=pair) <= 1000 or found.size == 2
    assert found.size > 2 or fixed == 5000
    assert pairs_in_a_chunk(pair, 5000, found.size, None) == found.size  # A run can be repeated.


def test_a_chunk_fits_the_least_of_all_devices(monkeypatch, tmp_path):
    def device(limit=None):
        return types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit} if limit else None)

    assert share_of_memory([device(800), device(400), device(1200)]) == 100
    whole = share_of_memory([device()])
    assert share_of_memory([device(), device()]) in (whole // 2, whole // 2 + 1)  # They share it.
    for text, share in (("max\n", share_of_memory([None])), ("4000\n", 1000)):
        container = tmp_path / text.strip()  # A file is read once.
        monkeypatch.setattr(_devices, "_CONTAINER", container)
        container.write_text(text)
        assert share_of_memory([None]) == share


def test_profiles_have_chunks_that_fit(key, uniform, monkeypatch):
    monkeypatch.setattr(_plan, "share_of_memory", lambda devices: 50_000)
    point = dpjax.operating_point(m=5000, gamma=0.05)
    settings = {"n": 100, "norm": "l1", "positions": "last", "point": point}
    *_, plan = sampled_distances(key, jnp.max, uniform, **settings)
    assert plan.layout == _plan.layout_that_fits(key, plan.pair, plan.layout)
    assert plan.layout.size < pairs_in_a_chunk(plan.pair, 5000, None, None)


def test_a_program_that_fits_is_compiled_once(keys, uniform, compilations):
    def target(database):
        return jnp.min(database) * 0.25

    def sample():
        return dpjax.sample_sensitivity(keys(0), target, uniform, n=7, norm="l1", m=700)

    assert compilations(sample).count("jit(_compiled_step)") == 1
    mean = dpjax.targets.host(np.mean, output=jax.ShapeDtypeStruct((), np.float32))
    names = compilations(
        lambda: dpjax.sample_distances(keys(0), mean, uniform, n=7, norm="l1", m=70)
    )
    assert names.count("jit(_compiled_step)") == 1


def test_chunks_follow_the_device_that_computes():
    """Not JAX's default backend: a CPU's mesh on a host with a GPU, or the other way around."""
    gpu = types.SimpleNamespace(platform="gpu")
    assert fitting(2**10, gpu) == 2**18
    assert fitting(2**10, jax.devices("cpu")[0]) == 2**11
    with jax.default_device("cpu"):
        assert fitting(2**10, None) == 2**11
    with jax.default_device(jax.devices("cpu")[0]):
        assert actual(None) is jax.devices("cpu")[0]


@pytest.fixture
def sample(key, uniform):
    return lambda progress: dpjax.sample_sensitivity(
        key, jnp.max, uniform, n=1, norm="l1", m=100, chunk_size=30, progress=progress
    )


def test_progress_is_shown_and_changes_nothing(sample, capsys):
    assert sample(progress=True).value == sample(progress=False).value
    shown = capsys.readouterr().err
    assert "100/100" in shown
    assert shown.count("100%") == 1


def test_progress_without_tqdm_says_what_to_install(sample, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpjax\[progress\]'"):
        sample(progress=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory in other units")
def test_a_million_pairs_of_a_thousand_records_in_two_gibibytes(run_python):
    printed = run_python("""
import re, jax, jax.numpy as jnp, dpjax
sensitivity = dpjax.sample_sensitivity(
    dpjax.random.seeded_key(0), jnp.mean, lambda key, n: jax.random.normal(key, (n,)),
    n=1000, norm="l1", m=10**6, gamma=0.01,
)
# Of this program alone: `getrusage` counts the process that forked, too.
print(sensitivity.m, re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
""")
    m, kibibytes = map(int, printed.split())
    assert m == 10**6
    assert kibibytes < 2 * 2**20
