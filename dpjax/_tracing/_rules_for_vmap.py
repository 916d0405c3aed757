"""Rules for `vmap` are left out, except those of dpjax: every lane runs the function itself.

A rule of `jax.custom_batching` is code that no trace shows. It may compute something else than its
function, and something else again for another number of lanes. The sampler runs a target for many
databases at once, and a release runs it for one. They agree if there is no rule.
"""

from collections.abc import Sequence

import jax
import jax.extend.core as jex

from dpjax._tracing._lapack import OneByOne
from dpjax._tracing._walks import Equation, equations, replaced, specs


def without_rules(traced: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program, in which functions stand without their users' rules for `vmap`."""
    if not any(map(_has_users_rule, equations(traced.jaxpr))):
        return traced
    again = jax.make_jaxpr(lambda *operands: replaced(traced, operands, _function_itself))
    return again(*specs(traced.in_avals))


def looks_at_other_lanes(equation: Equation) -> bool:
    """Whether dpjax's own rule for `vmap` joins lanes, as for keys that must differ."""
    rule = getattr(equation.params.get("rule"), "rule", None)
    return _has_rule(equation) and _is_of_dpjax(equation) and not isinstance(rule, OneByOne)


def _has_rule(equation: Equation) -> bool:
    return equation.primitive.name == "custom_vmap_call"


def _has_users_rule(equation: Equation) -> bool:
    return _has_rule(equation) and not _is_of_dpjax(equation)


def _is_of_dpjax(equation: Equation) -> bool:
    return str(equation.params["rule"].__module__).partition(".")[0] == "dpjax"


def _function_itself(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array] | None:
    if _has_users_rule(equation):
        return replaced(equation.params["call"], operands, _function_itself)
    return None
