"""An open ledger pays for every release of its process, whichever thread draws it."""

import asyncio
import concurrent.futures
import contextvars
import os
import threading

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import queries
from dpjax._core import _open_ledgers

LAPLACE = dpjax.laplace(1.0, 0.1)
GAUSSIAN = dpjax.gaussian(1.0, 0.1, 1e-8)
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
OF_A_PART = dpjax.laplace(queries.counting_query().sensitivity(relation=ADDED), 0.1)


def _by_thread(work):
    done = concurrent.futures.Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return done.result(0)


def _by_executor(work):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return pool.submit(work).result(60)


def _by_executor_of_executor(work):
    return _by_executor(lambda: _by_executor(work))


def _by_joblib(work):
    joblib = pytest.importorskip("joblib")
    delayed = [joblib.delayed(work)()]
    return joblib.Parallel(n_jobs=2, backend="threading")(delayed)[0]


def _by_task(work):
    async def main():
        async def one():
            await asyncio.sleep(0)
            return work()

        return await asyncio.create_task(one())

    return asyncio.run(main())


def _by_loop(work):
    async def main():
        return await asyncio.get_running_loop().run_in_executor(None, work)

    return asyncio.run(main())


def _by_to_thread(work):
    return asyncio.run(asyncio.to_thread(work))


def _by_empty_context(work):
    return contextvars.Context().run(work)


ELSEWHERE = {
    "thread": _by_thread,
    "executor": _by_executor,
    "executor of executor": _by_executor_of_executor,
    "joblib": _by_joblib,
    "task": _by_task,
    "loop": _by_loop,
    "to_thread": _by_to_thread,
    "empty context": _by_empty_context,
}


@pytest.fixture
def ledger(tmp_path):
    return dpjax.Ledger(tmp_path / "ledger.db", epsilon=1.0, delta=1e-6)


@pytest.fixture
def other(tmp_path):
    return dpjax.Ledger(tmp_path / "other.db", epsilon=1.0, delta=1e-6)


def paid(ledger):
    return len(ledger.history())


@pytest.mark.parametrize("way", ELSEWHERE)
def test_a_release_elsewhere_in_the_process_is_paid_or_refused(way, ledger, keys):
    """All that draws noise reaches `told`.

    These are mechanisms, private functions, trainings and their steps, for a budget, a share and a
    ledger of keys; compiled programs are refused. A part is tried below.
    """
    elsewhere = ELSEWHERE[way]
    private = dpjax.privatize(jnp.mean, LAPLACE)
    compiled = jax.jit(lambda key: LAPLACE(key, 0.0).value)
    compiled(keys(0))  # While no ledger is open.
    used = dpjax.random.KeyLedger()
    with ledger, used:
        elsewhere(lambda: LAPLACE(keys(1), 0.0))
        elsewhere(lambda: private(keys(2), jnp.zeros(3)))
        assert paid(ledger) == len(used) == 2
        with pytest.raises(ValueError, match="was used for a release before"):
            elsewhere(lambda: LAPLACE(keys(1), 0.0))
        with pytest.raises(TypeError, match="records keys on the host"):
            elsewhere(lambda: compiled(keys(3)))
        with pytest.raises(dpjax.BudgetExceededError):
            elsewhere(lambda: dpjax.laplace(1.0, 0.9)(keys(4), 0.0))
        noise = dpjax.learning.gaussian_noise(keys(5), noise_multiplier=1.0, batch_size=1)
        with pytest.raises(ValueError, match="pays for all of its steps at once"):
            elsewhere(lambda: noise.init(jnp.zeros(2)))
    with ledger.share(0.25) as share:
        elsewhere(lambda: GAUSSIAN(keys(6), 0.0))
        assert share.remaining < 1
    elsewhere(lambda: LAPLACE(keys(7), 0.0))  # Outside.
    elsewhere(lambda: compiled(keys(7)))
    assert paid(ledger) == 3
    assert not _open_ledgers._PROCESS.blocks


def test_threads_that_open_their_own_ledgers_pay_from_these(ledger, other, keys):
    inside = threading.Barrier(2)

    def work(own, first):
        with own:
            inside.wait(60)
            for i in range(3):
                LAPLACE(keys(first + i), 0.0)
            inside.wait(60)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        works = [pool.submit(work, ledger, 0), pool.submit(work, other, 3)]
        assert [work.exception(60) for work in works] == [None, None]
    assert paid(ledger) == paid(other) == 3


def test_each_thread_pays_for_its_part(tmp_path, keys):
    """The block of `parallel` is open in another thread, and what is around a part is no budget."""
    ledger = dpjax.Ledger(tmp_path / "added.db", epsilon=1, relation=ADDED)
    inside = threading.Barrier(2)

    def work(own, key):
        with own:
            inside.wait(60)
            OF_A_PART(key, 0.0)
            _by_task(lambda: OF_A_PART(jax.random.fold_in(key, 1), 0.0))
            inside.wait(60)

    with ledger.parallel("cut") as part, concurrent.futures.ThreadPoolExecutor(2) as pool:
        names = ("Fair", "Good")
        works = [pool.submit(work, part(name), keys(i)) for i, name in enumerate(names)]
        for done in works:
            done.result(60)
        with part("Ideal"):
            _by_thread(lambda: OF_A_PART(keys(2), 0.0))
    whats = [row["what"].split()[-1] for row in ledger.history()]
    assert sorted(whats) == ["'Fair'", "'Fair'", "'Good'", "'Good'", "'Ideal'"]
    assert ledger.spent.epsilon == 0.2


def test_a_thread_of_nobody_is_refused_where_two_budgets_are_open(ledger, other, keys):
    """A guess would charge one database for a release about the other; an argument decides."""
    inside = threading.Barrier(2)

    def holds():
        with other:
            inside.wait(60)
            inside.wait(60)

    holder = threading.Thread(target=holds)
    holder.start()
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=other)
    with ledger:
        inside.wait(60)
        try:
            with pytest.raises(ValueError, match=r"one ledger pays .* got 2 open.*In a thread"):
                _by_thread(lambda: LAPLACE(keys(0), 0.0))
            assert paid(ledger) == paid(other) == 0
            _by_thread(lambda: private(keys(1), jnp.zeros(3)))
            _by_thread(lambda: contextvars.copy_context().run(_in, ledger, keys(2)))
            LAPLACE(keys(3), 0.0)  # Here the nearest block pays, and no other one is asked.
        finally:
            inside.wait(60)
            holder.join(60)
        _by_thread(lambda: LAPLACE(keys(4), 0.0))
    assert (paid(ledger), paid(other)) == (3, 1)


def _in(ledger, key):
    with ledger:
        LAPLACE(key, 0.0)


def test_a_thread_that_outlives_the_block_is_paid_while_the_block_is_open(ledger, keys):
    """Then it is outside. A task keeps the blocks that it began in, so it pays on."""
    step, steps = threading.Barrier(2), []

    def lives_on():
        for i in range(2):
            step.wait(60)
            LAPLACE(keys(i), 0.0)
            steps.append(paid(ledger))
            step.wait(60)

    thread = threading.Thread(target=lives_on)
    with ledger:
        thread.start()
        step.wait(60), step.wait(60)
    step.wait(60), step.wait(60)
    thread.join(60)
    assert steps == [1, 1]

    async def main():
        async def task():
            await asyncio.sleep(0)
            LAPLACE(keys(2), 0.0)

        with ledger:
            later = asyncio.create_task(task())
        await later

    asyncio.run(main())
    assert paid(ledger) == 2


def test_coroutines_that_take_turns_leave_their_own_blocks(ledger, other, keys):
    """Blocks that overlap in one thread, with programs that were compiled before."""
    compiled = jax.jit(lambda key: LAPLACE(key, 0.0).value)
    compiled(keys(0))

    async def work(own, first, turns):
        with own:
            for i in range(turns):
                LAPLACE(keys(first + i), 0.0)
                await asyncio.sleep(0)
                with pytest.raises(TypeError, match="records keys on the host"):
                    compiled(keys(0))

    async def main():
        await asyncio.gather(work(ledger, 1, 1), work(other, 4, 3))

    asyncio.run(main())
    assert (paid(ledger), paid(other)) == (1, 3)
    compiled(keys(0))


def test_a_block_that_a_generator_holds_ends_where_it_is_closed(ledger, keys):
    def generator():
        with ledger:
            yield

    held = contextvars.Context().run(_started, generator())
    LAPLACE(keys(0), 0.0)
    held.close()  # In another context.
    LAPLACE(keys(1), 0.0)
    assert paid(ledger) == 1
    assert not _open_ledgers._PROCESS.blocks


def _started(generator):
    next(generator)
    return generator


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_pays_from_the_blocks_that_were_open(ledger, other):
    """As the child of a fork does, without one: JAX warns about forks of its threads.

    `multiprocessing.Pool` replaces its workers from a thread of its own, and an executor may fork
    in any thread: these have opened nothing. What has opened a block of its own pays from that one.
    """

    def forked():
        _open_ledgers._after_fork()
        return _open_ledgers.told()

    with ledger:
        assert _by_thread(forked) == [ledger]
        with other:
            _open_ledgers._after_fork()
        assert _open_ledgers.told() == [ledger]
    assert _by_thread(forked) == []


def test_what_is_about_no_part_is_paid_by_the_ledger(ledger, keys):
    """It was drawn and not paid. What else is inside of the block: threads, and a part's releases.

    After the block nothing of it pays.
    """
    with ledger.parallel("sex") as parts:
        LAPLACE(keys(0), jnp.zeros(()))
        assert ledger.spent.epsilon == pytest.approx(0.1)
        _by_thread(lambda: LAPLACE(keys(1), jnp.zeros(())))
        assert ledger.spent.epsilon == pytest.approx(0.2)
        with parts("f"):
            OF_A_PART(keys(2), jnp.zeros((), int))
        inside = ledger.spent.epsilon
        assert inside > 0.29
    LAPLACE(keys(3), jnp.zeros(()))
    assert ledger.spent.epsilon == inside
