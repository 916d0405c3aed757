"""Checks that a mechanism keeps its guarantee."""

from dpjax.auditing._adversarial_pair import AdversarialPair, Ball, adversarial_pair
from dpjax.auditing._audit import AuditResult, audit, audit_curve
from dpjax.auditing._conformance import check_conformance
from dpjax.auditing._events import Event
from dpjax.auditing._one_run import one_run_epsilon
from dpjax.auditing._verify import verify

__all__ = [
    "AdversarialPair",
    "AuditResult",
    "Ball",
    "Event",
    "adversarial_pair",
    "audit",
    "audit_curve",
    "check_conformance",
    "one_run_epsilon",
    "verify",
]
