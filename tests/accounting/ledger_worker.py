"""A process that debits one unit at a time; it prints what it relies on. JAX is not imported.

Arguments: path, budget, number of debits, and "forked" for half of them by a child.
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

from dpjax.accounting._ledger_errors import BudgetExceededError  # noqa: E402
from dpjax.accounting._ledger_file import LedgerFile  # noqa: E402


def main():
    path, budget, count, *forked = sys.argv[1:]
    file = LedgerFile(path, (int(budget), 0))
    print("open", flush=True)
    child = os.fork() if forked else None
    for _ in range(int(count)):
        try:
            file.debit((1, 0), neighbors="n", key=None)
        except BudgetExceededError:
            continue
        print("paid", flush=True)
    if child:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
    assert not {"jax", "numpy"} & set(sys.modules)
