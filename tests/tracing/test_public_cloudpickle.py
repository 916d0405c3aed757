"""Why host code is not frozen by the public names of cloudpickle alone: an example for each reason.

If one of these tests fails, cloudpickle has learned it, and `_host_code.py` may need less.
"""

import importlib
import pickle
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

MODULE = """
import threading
import {name}_helper

class Model:
    factor = 2.0

def by_a_class(x):
    return Model.factor * x

def by_a_set(x):
    return x in {{"a", "b", "c", "d", "e", "f", "g", "h"}}

def by_a_module(x):
    return {name}_helper.double(x)

def plain(x):
    return x
"""
HELPER = "import threading\nlock = threading.Lock()\ndef double(x):\n    return 2 * x\n"


@pytest.fixture
def theirs(tmp_path, monkeypatch, request):
    """A module of the user, which imports another, both pickled by value."""
    name = f"theirs_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / f"{name}_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    modules = [importlib.import_module(found) for found in (name, f"{name}_helper")]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield modules[0]
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]


def bytes_differ(theirs, *environments):
    """For each of three functions, whether two processes pickle it to different bytes."""
    functions = "plain", "by_a_set", "by_a_class"
    program = (
        f"import sys; sys.path.insert(0, {theirs.__file__.rpartition('/')[0]!r})\n"
        f"import cloudpickle, {theirs.__name__} as theirs\n"
        "cloudpickle.register_pickle_by_value(theirs)\n"
        f"for name in {functions}: print(cloudpickle.dumps(getattr(theirs, name)).hex())"
    )
    command = [sys.executable, "-c", program]
    settings = {"capture_output": True, "text": True, "check": True}
    one, other = (
        subprocess.run(command, env=env, **settings).stdout.split() for env in environments
    )
    return {name: x != y for name, x, y in zip(functions, one, other, strict=True)}


def test_sets_and_classes_have_other_bytes_in_every_process(theirs):
    one, other = ({"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"} for seed in "12")
    found = bytes_differ(theirs, one, other)
    assert found == {"plain": False, "by_a_set": True, "by_a_class": True}


def test_a_copy_sets_the_attributes_of_the_original_back(theirs):
    pickled = cloudpickle.dumps(theirs.by_a_class)
    theirs.Model.factor = 3.0
    assert pickle.loads(pickled)(1.0) == 2.0
    assert theirs.Model.factor == 2.0


def test_a_comment_changes_the_bytes(theirs):
    before = cloudpickle.dumps(theirs.plain)
    code = theirs.plain.__code__
    theirs.plain.__code__ = code.replace(co_firstlineno=code.co_firstlineno + 1)
    assert cloudpickle.dumps(theirs.plain) != before


def test_a_module_is_pickled_whole(theirs):
    """A function names one function of it, and a lock that it does not name stands in the way."""
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        cloudpickle.dumps(theirs.by_a_module)


def test_arrays_of_jax_stay_arrays_of_jax():
    """Code that JAX calls back would wait for them for ever."""
    values = jnp.ones(2)
    assert isinstance(pickle.loads(cloudpickle.dumps(lambda: values))(), jax.Array)
