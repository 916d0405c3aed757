"""What is compiled for one program after the other is kept for the last ones alone.

Whatever holds a program holds what was compiled of it: samplings, probes, releases, shapes of
noise, sweeps and trainings of attacks all compile by `kept_jit`.
"""

import functools
import gc
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

import dpjax
from dpjax._tracing import _programs
from dpjax._tracing._programs import _MOST_KEPT, kept_jit, quick_options
from dpjax.sensitivity import _chunks


class Static:
    pass


def test_the_last_ones_are_kept():
    traced = []

    @kept_jit("factor", donate=(0,))
    def scaled(x, y=0.0, *, factor):
        traced.append(factor)
        return x + y

    def run(factor):
        return scaled(jnp.ones(3), factor=factor)

    factors = [Static() for _ in range(_MOST_KEPT + 20)]
    for factor in factors:
        run(factor)
    run(factors[-1])
    assert len(traced) == len(factors)  # The last one was found.
    assert scaled.lower(np.ones(2), factor=factors[0]).compile() is not None
    references = [weakref.ref(factor) for factor in factors]
    traced.clear()
    factors.clear()
    del factor
    gc.collect()
    assert sum(reference() is not None for reference in references) == _MOST_KEPT


def live_executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_a_process_that_releases_one_target_after_the_other_does_not_grow(keys, monkeypatch):
    """It grew by five megabytes for each. Here the last two are kept."""
    for kept in (_chunks._compiled_step, _programs.evaluate_alone):
        few = functools.lru_cache(2)(kept._compiled.__wrapped__)
        monkeypatch.setattr(kept, "_compiled", few)

    def release(i):
        target = lambda d: jnp.mean(d) * np.float32(1 + i / 1000)  # noqa: E731
        sensitivity = dpjax.sample_sensitivity(
            keys(i),
            target,
            lambda key, n: jax.random.uniform(key, (n,)),
            n=20,
            norm="l1",
            gamma=0.2,
            m=40,
        )
        dpjax.privatize(target, dpjax.laplace(sensitivity, epsilon=1.0))(keys(i), jnp.ones(20))

    for i in range(3):
        release(i)
    before = live_executables()
    for i in range(3, 6):
        release(i)
    assert live_executables() <= before


def test_no_program_is_a_static_argument_of_a_plain_jit():
    """JAX would keep what it compiled of 4096 programs."""
    root = Path(dpjax.__file__).parent
    texts = "\n".join(path.read_text() for path in root.rglob("*.py"))
    static = re.findall(r"jax\.jit, static_argnames=(.*?)\)\n", texts)
    assert len(static) > 5  # It finds those that are left.
    assert not re.search(r'"(pair|program|norm|target|oracle)"', " ".join(static))


def test_options_are_those_that_a_jaxlib_knows():
    """jaxlib 0.11.1 refuses the option of its old emitters, and with it the first release."""
    assert quick_options((0, 11, 1)) == quick_options((0, 11, 2))
    known_before = set(quick_options((0, 11, 0))) - set(quick_options((0, 11, 1)))
    assert known_before == {"xla_cpu_use_fusion_emitters"}
    assert (
        int(
            jax.jit(
                lambda x: x + 1, compiler_options=quick_options(jaxlib.version.__version_info__)
            )(1)
        )
        == 2
    )
