"""Why a ledger refuses."""


class LedgerError(RuntimeError):
    """A ledger cannot be trusted or not be written: nothing is released.

    Attributes:
        args: what is wrong with which file.

    Formal guarantees:
        Raised before noise is drawn, or before what was drawn is returned. It depends on the
        ledger's files alone, never on private data.
    """


class BudgetExceededError(RuntimeError):
    """A release would cost more than is left of the budget.

    Attributes:
        args: what it would cost, and what is left.

    Formal guarantees:
        Nothing was debited and no noise was drawn. It depends on the ledger and the guarantee
        alone, never on private data.
    """
