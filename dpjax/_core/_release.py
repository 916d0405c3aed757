"""A published value, with its guarantee."""

from dpjax._core._guarantee import Guarantee
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Value


@frozen_pytree
class Release:
    """A published value and the guarantee that it was published under; nothing else.

    Attributes:
        value: the noisy value.
        guarantee: of publishing it.

    Formal guarantees:
        Holds neither the database nor the target's exact value, so it may be stored and sent.
    """

    value: Value
    guarantee: Guarantee

    def __repr__(self) -> str:
        return f"Release({self.value!r}, {self.guarantee!r})"
