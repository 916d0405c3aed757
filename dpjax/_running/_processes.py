"""Groups of processes that make the same call, and that tell each other about errors.

A collective operation waits for all processes, even for those that have failed. So before each
collective, the processes wait for each other in the key-value store of `jax.distributed`, and check
for failures while they wait.
"""

import atexit
import collections
import contextlib
import time
from collections.abc import Generator
from typing import Any

import jax
from jax._src import distributed  # JAX has no public name for the key-value store of its processes.
from jax.sharding import Mesh

from dpjax._tracing._host_calls import FailedElsewhereError, StoppedError, watching

_NAP, _BETWEEN_LOOKS = 0.02, 1.0
_ENDED = "dpjax/ended/"
# How many calls each group of processes has made. The processes of a group make their calls in the
# same order, as collectives require, so their counts agree.
_calls: collections.Counter[tuple[int, ...]] = collections.Counter()


class Team:
    """A group of processes that make one call together. A single process never waits."""

    def __init__(self, members: tuple[int, ...]):
        """Begins a call by the processes `members`. All of them give this call the same name."""
        self._others = set(members) - {jax.process_index()}
        self._meetings = 0
        self._last_look = 0.0
        if self._others:
            _calls[members] += 1
            self._name = f"dpjax/{'-'.join(map(str, members))}/{_calls[members]}"

    def meet(self, text: str = "") -> set[str]:
        """Waits until all processes have called this, and returns the texts that they passed."""
        if not self._others:
            return {text}
        self._meetings += 1
        place = f"{self._name}/{self._meetings}/"
        _store().key_value_set(f"{place}{jax.process_index()}", text)
        while missing := self._others - (texts := _read(place)).keys():
            self._refuse_failures(missing)
            time.sleep(_NAP)
        return set(texts.values())

    def look(self, *, at_once: bool = False) -> None:
        """Raises an error if another process has failed. It checks at most once a second."""
        if self._others and (at_once or time.monotonic() > self._last_look + _BETWEEN_LOOKS):
            self._last_look = time.monotonic()
            self._refuse_failures(self._others)

    def fail(self, error: BaseException) -> None:
        """Tells the other processes that this process has failed."""
        if self._others:
            text = " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())
            with contextlib.suppress(Exception):  # The key-value store may be gone.
                _store().key_value_set(f"{self._name}/failed/{jax.process_index()}", text)

    def _refuse_failures(self, awaited: set[int]) -> None:
        failed = _read(f"{self._name}/failed/")
        for process in sorted(self._others & failed.keys()):
            raise FailedElsewhereError(f"process {process} of the call failed: {failed[process]}")
        for process in sorted(awaited & _read(_ENDED).keys()):
            raise FailedElsewhereError(f"process {process} has ended without making this call")


@contextlib.contextmanager
def together(mesh: Mesh | None) -> Generator[Team, None, None]:
    """A context in which the processes of a mesh learn of each other's errors."""
    here, count = jax.process_index(), jax.process_count()
    members = {here}
    if isinstance(mesh, Mesh) and count > 1:
        of_mesh = {device.process_index for device in mesh.devices.flat}
        members = of_mesh if here in of_mesh else members
    elif mesh is not None:  # All other processes must learn that this process refuses the mesh.
        members = set(range(count))
    team = Team(tuple(sorted(members)))
    try:
        with watching(team.look):
            yield team
    except FailedElsewhereError:
        raise
    except BaseException as error:
        if isinstance(error, StoppedError):
            team.look(at_once=True)
        team.fail(error)
        raise


def _read(place: str) -> dict[int, str]:
    """Returns what each process wrote under a directory of the store, by process index."""
    entries = _store().key_value_dir_get(place)
    return {int(key.rpartition("/")[2]): text for key, text in entries}


def _store() -> Any:
    if distributed.global_state.client is None:
        raise ValueError("mesh has devices of several processes: call jax.distributed.initialize")
    return distributed.global_state.client


@atexit.register
def _say_that_it_has_ended() -> None:
    """Tells other processes that this one ends, before JAX's exit handler waits for them."""
    if distributed.global_state.client is not None:
        with contextlib.suppress(Exception):
            _store().key_value_set(f"{_ENDED}{jax.process_index()}", "")
