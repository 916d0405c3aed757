"""A process that debits one unit at a time; it prints what it relies on. JAX is not imported.

Arguments: path, budget, number of debits, and "forked" for as many by a child; or "outlived", for a
parent that closes the file and opens it again while the child writes.
"""

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for name in ("dpjax", "dpjax.accounting"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules[name] = package

from dpjax._files._ledger_file import BudgetExceededError, LedgerFile  # noqa: E402


def pay(file):
    try:
        file.debit((1, 0), neighbors="n", key=None)
    except BudgetExceededError:
        return
    print("paid", flush=True)


def main():
    path, budget, count, *forked = sys.argv[1:]
    file, left = LedgerFile(path, (int(budget), 0)), int(count)
    print("open", flush=True)
    started, start = os.pipe()
    child = os.fork() if forked else None
    if forked == ["outlived"]:
        if child:
            os.read(started, 1)
            file.close()
            file = LedgerFile(path, (int(budget), 0))
        else:
            pay(file)
            os.write(start, b"1")
            left -= 1
    for _ in range(left):
        pay(file)
    if child:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
    assert not {"jax", "numpy"} & set(sys.modules)
