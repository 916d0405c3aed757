"""The risk of several releases together, and of private trainings."""

from dpjax._core import _checks
from dpjax._core._risk import MOST_DIMS, Risk, risk_of_kinds
from dpjax._core._values import Guarantee, Mechanism
from dpjax.accounting._compose_events import counted_losses
from dpjax.accounting._composition import common_relation, compose, release_under
from dpjax.accounting._concentrated import guarantee_of


def risk(*releases: Mechanism | Guarantee, dims: int = MOST_DIMS) -> Risk:
    """What any attack can learn about one record from several releases together.

    An epsilon bounds the privacy loss in the worst case. But the success of most attacks depends on
    the whole distribution of the loss: with Gaussian noise, an attacker gains much less than
    epsilon and delta alone allow.

    Args:
        *releases: a mechanism, or a guarantee, for each release. For a guarantee, the bounds use
            only its epsilon and delta, because its noise is not known. Relations are combined as in
            `compose_at`.
        dims: the largest number of coordinates in a release, as in `compose_at`.

    Returns:
        A `Risk`: `advantage`, `tradeoff(false_positive_rate)` and `reconstruction_bound(prior)`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a release is neither a mechanism nor a concrete guarantee.
        ValueError: if no release is given, or their privacy units differ.

    Formal guarantees:
        Bounds for every attack on two neighboring databases, for releases that are chosen in
        advance as in `compose`. Losses are rounded up by dp-accounting. The noise tables, and the
        rounding of Fourier transforms, are charged. If gammas are above 0, the bounds hold for all
        pairs of databases except for a fraction of at most the sum of the gammas. They hold at the
        confidence of `compose`, which also matters for a guarantee by `monte_carlo`, although its
        gamma is 0.

        The reconstruction bound is 1 - f(p), where f is the trade-off curve and p the prior.
        Compare the release with one in which the record is a fixed other record. There the
        attacker succeeds with probability at most p. 1 - f is concave, so an average over records
        is at most 1 - f(p).

    Source:
        Wasserman and Zhou (2010); Dong, Roth and Su, "Gaussian differential privacy" (2022);
        Kulynych, Gomez, Kaissis, du Pin Calmon and Troncoso, "Attack-aware noise calibration for
        differential privacy" (2024).

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.gaussian(1.0, epsilon=1.0, delta=1e-6)
        >>> round(dpjax.accounting.risk(mechanism).advantage, 3)
        0.094
        >>> round(dpjax.accounting.risk(mechanism.guarantee).advantage, 3)
        0.462
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    dims = _checks.integer("dims", dims, least=1)
    promised = [guarantee_of(release) for release in releases]
    together = compose(*promised)  # This refuses guarantees for different privacy units.
    relation = common_relation(promised)
    alike = [release_under(release, relation) for release in releases]
    counts = counted_losses(alike, accounting)
    return risk_of_kinds(tuple(counts.items()), relation, float(together.gamma), dims)
