"""`posterior_sampler`: private draws from a posterior over a public list of parameters.

docs/proofs/posterior-sampler.md has the proofs.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import PyTree
from dpjax._core._values import Scalar, Sensitivity
from dpjax.mechanisms._selection import EXPONENTIAL_RULE, SelectionMechanism, log_weights
from dpjax.mechanisms._start import begin
from dpjax.random._grid_fit import Calibration


@frozen_pytree
class PosteriorSampler(SelectionMechanism):
    """Selects a parameter by its posterior probability; made by `posterior_sampler`.

    Its attributes are those of `SelectionMechanism`. `log_base` contains the log prior weights.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    _scale_name = "temperature"

    @property
    def temperature(self) -> Scalar:
        """max(1, sensitivity / epsilon). The likelihood is raised to the power 1 / temperature.

        At temperature 1, parameters are drawn from the posterior itself, with a small deviation:
        the temperature that is actually used is `effective_scale`, which is slightly above 1.
        """
        needed = self._most_range / self.epsilon
        return jnp.maximum(needed, 1) if _checks.is_traced(needed) else max(float(needed), 1.0)

    def _calibration(self, arrays: PyTree) -> Calibration:
        return dataclasses.replace(super()._calibration(arrays), scale=self.temperature)


def posterior_sampler(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, log_prior: ArrayLike
) -> PosteriorSampler:
    """Draws from a posterior over public parameters, with the likelihood tempered for privacy.

    Parameter k is drawn with probability proportional to prior_k exp(log p(D | theta_k) /
    temperature). This is the exponential mechanism, with the log likelihood as score and the prior
    as base weights. If a record changes all log likelihoods by the same amount, the probabilities
    do not change. So the sensitivity is measured in the norm "range".

    Args:
        sensitivity: a `Sensitivity` of the log likelihoods in the norm "range", or a number, which
            is taken as a global bound in that norm.
        epsilon: finite, above 0. At `epsilon=sensitivity.value` the temperature is 1. A larger
            epsilon has no benefit.
        log_prior: shape (K,), the log prior weights of the parameters. Pass zeros if the parameters
            are draws from the prior. Parameters and prior must be public.

    Returns:
        A `PosteriorSampler`: `mechanism(key, log_likelihoods)` takes shape (K,), as
        `dpjax.targets.log_likelihoods` returns them, and releases an index, int32. NaN counts as
        the lowest likelihood.

    Raises:
        TypeError: if log_prior is a function instead of a list of weights. A continuous posterior
            would need a Markov chain, and after finitely many steps a chain is not an exact draw.
            A chain would add a delta of e^epsilon + 1 times its total variation distance from the
            posterior, on the worst database. No diagnostic bounds this distance.
        ValueError: as for `dpjax.exponential`, or if the norm is not "range", or the sensitivity 0.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation, by the proof in
        docs/proofs/posterior-sampler.md. Each draw is epsilon^2 / 8-zCDP. So k draws at epsilon / k
        each are epsilon^2 / (8 k)-zCDP: see `dpjax.accounting.compose_at` with "zcdp". A wrong
        model makes the posterior useless, but not less private.

    Source:
        Mir (2012); Dimitrakakis, Nelson, Mitrokotsa and Rubinstein (2014, 2017); Wang, Fienberg and
        Smola (2015); Dong, Durfee and Rogers (2020) for bounded range.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> rates = jnp.linspace(0.1, 0.9, 9)
        >>> target = dpjax.targets.log_likelihoods(
        ...     lambda x, rate: jnp.where(x, jnp.log(rate), jnp.log1p(-rate)), rates
        ... )
        >>> widest = 2 * float(jnp.log(rates[-1] / rates[0]))  # Of a replaced record.
        >>> # Each of two sums of 1,000 numbers in float32 is off by less than .14, for each rate.
        >>> sampler = dpjax.posterior_sampler(widest + 4 * 0.14, 2.0, log_prior=jnp.zeros(9))
        >>> heads = jnp.arange(1000) % 10 < 3
        >>> release = dpjax.privatize(target, sampler)(dpjax.random.seeded_key(0), heads)
        >>> round(float(rates[release.value]), 1)
        0.3
    """
    if callable(log_prior):
        raise TypeError(
            "log_prior must be log weights of a public list of parameters, got a function: a"
            " continuous posterior would need a Markov chain, which does not draw exactly from the"
            " posterior, and whose error has no certified bound. Draw a list of parameters from the"
            " prior, and pass zeros as log_prior"
        )
    sensitivity, epsilon = begin("range", sensitivity, epsilon)
    if sensitivity.zero_allowed:
        raise ValueError(
            "sensitivity must be above 0, got 0: at sensitivity 0 the posterior is equal to the "
            "prior, and can be published without a mechanism"
        )
    base = log_weights("log_prior", log_prior)
    return PosteriorSampler(sensitivity, epsilon, EXPONENTIAL_RULE, log_base=base)
