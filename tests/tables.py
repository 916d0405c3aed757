"""Tables that one test checks row by row, and refusals that fail a test by an assertion."""

import contextlib
import functools
import inspect
import traceback
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "dpjax"


def is_own_assertion(problem):
    """Whether an exception is an assertion of a test, not one of the code that the test runs."""
    if not isinstance(problem, (AssertionError, pytest.fail.Exception)):
        return False
    files = [Path(x.filename) for x in traceback.extract_tb(problem.__traceback__)]
    # JAX and NumPy assert on behalf of the tests that call them, and so do the auditing tools.
    ours = [x for x in files if x.is_relative_to(TESTS) or x.is_relative_to(PACKAGE)]
    return ours[-1].is_relative_to(TESTS) or ours[-1].is_relative_to(PACKAGE / "auditing")


@contextlib.contextmanager
def no_refusal(*kinds):
    """Fails the test where the package refuses what it must accept.

    A mutant that refuses is killed by an assertion alone. `kinds` are further exceptions.
    """
    try:
        yield
    except (TypeError, ValueError, *kinds) as error:
        pytest.fail(f"refused: {error}")


def for_each(names, rows):
    """Makes one test of all rows of a table; it fails with every row that fails.

    Args:
        names: the arguments that a row fills, as in `pytest.mark.parametrize`. The others are
            fixtures, which all rows share.
        rows: values of the argument, or tuples of several.
    """
    names, rows = [name.strip() for name in names.split(",")], list(rows)
    assert rows

    def of_all(test):
        signature = inspect.signature(test)

        @functools.wraps(test)
        def whole(**fixtures):
            problems, lines = [], []
            for row in rows:
                values = row if len(names) > 1 else (row,)
                try:
                    test(**dict(zip(names, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as problem:
                    problems.append(problem)
                    lines += [f"{row!s:.200}", *traceback.format_exception(problem)]
            if problems:
                text = "\n".join([f"{len(problems)} of {len(rows)} rows fail", *lines])
                asserted = any(map(is_own_assertion, problems))
                raise AssertionError(text) if asserted else RuntimeError(text)

        left = [x for x in signature.parameters.values() if x.name not in names]
        whole.__signature__ = signature.replace(parameters=left)
        return whole

    return of_all
