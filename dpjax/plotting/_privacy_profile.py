"""The curve of gamma and delta of releases, against epsilon."""

from typing import TYPE_CHECKING

import numpy as np

from dpjax.auditing._privacy_profile import PrivacyProfile
from dpjax.plotting._axes import GREEN, axes_or_new, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS, _WIDEST = 201, 4


def privacy_profile(profile: PrivacyProfile, *, ax: "Axes | None" = None) -> "Axes":
    """Plots gamma and delta of a profile against epsilon, to four times that of the mechanisms.

    Args:
        profile: of `dpjax.privacy_profile`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Formal guarantees:
        Those of the profile, for all of both curves at once.

    Source:
        None.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> release = jnp.mean, dpjax.laplace(1 / 100, epsilon=1.0)
        >>> profile = dpjax.privacy_profile(
        ...     dpjax.random.seeded_key(0),
        ...     release,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=100,
        ...     m=1000,
        ... )
        >>> dpjax.plotting.privacy_profile(profile).get_xlabel()
        'epsilon'
    """
    ax = axes_or_new(ax)
    epsilons = np.linspace(0, _WIDEST * profile.epsilon, _POINTS)
    gammas = [profile.gamma(float(epsilon)) for epsilon in epsilons]
    ax.plot(epsilons, gammas, label="gamma: pairs that lose more", markevery=20, **style(0))
    ax.plot(
        epsilons, profile.delta(epsilons), label="delta: average pair", markevery=20, **style(1)
    )
    ax.axvline(profile.epsilon, color=GREEN, linestyle=":", label="epsilon of the mechanisms")
    ax.set_yscale("log")
    ax.set_xlabel("epsilon")
    ax.set_ylabel(f"limit, confidence {profile.confidence:g}")
    legend_above(ax)
    return ax
