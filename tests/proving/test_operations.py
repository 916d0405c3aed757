"""The table of operations holds every fact about a primitive, and nothing else does."""

import ast
from pathlib import Path

import jax.extend.core.primitives as primitives

from dpjax._tracing._walks import JITS
from dpjax.proving import _operations
from dpjax.proving._operations import OPERATIONS
from elementary_table import ELEMENTARY

ROOM = Path(_operations.__file__).parent
NAMES = {x.name for key, x in vars(primitives).items() if key.endswith("_p")} | set(OPERATIONS)
# Words of English or keyword arguments, which are names of primitives too.
WORDS = {"name"}


def texts(node):
    return {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}


def files():
    return {path.name: ast.parse(path.read_text()) for path in sorted(ROOM.glob("*.py"))}


def test_every_primitive_that_the_room_names_has_a_row():
    known = set(OPERATIONS) | JITS | WORDS
    named = {name: texts(tree) & NAMES - known for name, tree in files().items()}
    assert {name: found for name, found in named.items() if found} == {}


def test_there_is_no_other_list_of_primitives():
    """Lemmas compare with two or three names in a row; more would be a list.

    The table of lemmas names the last operation of each. The enclosures of boxes are no rules: they
    compute in float64, on the device.
    """
    lists = [
        (name, node.lineno, sorted(texts(node) & set(OPERATIONS)))
        for name, tree in files().items()
        if name not in ("_operations.py", "_patterns.py", "_record_parts.py", "_slopes.py")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple))
        and len(texts(node) & set(OPERATIONS)) > 3
    ]
    assert lists == []


def test_every_elementary_function_of_the_tests_has_a_row():
    named = {name.split(" near ")[0] for name in ELEMENTARY}
    assert named <= set(OPERATIONS)


def test_operations_without_a_rule_say_what_to_write_instead():
    usual = _operations.Operation().remedy
    silent = [name for name, row in OPERATIONS.items() if not row.rule and row.remedy == usual]
    assert silent == []
