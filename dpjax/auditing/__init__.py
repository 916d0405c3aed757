"""Checks that a mechanism keeps its guarantee, and measures what it gives away.

Three functions check a mechanism, and differ in what they see and in what they answer.

- `audit` sees outputs for two values, and returns a number: the largest lower bound on epsilon, or
  on delta, that it can show. It judges nothing.
- `verify` runs `audit` and judges: it raises if the bound refutes a claim. It is for test suites,
  and for any function that draws, also one that dpjax did not make.
- `check_conformance` sees a factory of mechanisms and all that they say of themselves. It returns a
  report, or raises on the first failed check. It is for mechanisms that you write for dpjax.

`calibration` checks the reader's side: whether posteriors given releases contain the truth as often
as they say.
"""

from dpjax.auditing._adversarial_pair import AdversarialPair, adversarial_pair
from dpjax.auditing._audit import AuditResult, audit, audit_curve
from dpjax.auditing._calibration import Calibration, calibration
from dpjax.auditing._conformance import ConformanceReport, check_conformance
from dpjax.auditing._events import Event
from dpjax.auditing._one_run import one_run_epsilon
from dpjax.auditing._verify import verify

__all__ = [
    "AdversarialPair",
    "AuditResult",
    "Calibration",
    "ConformanceReport",
    "Event",
    "adversarial_pair",
    "audit",
    "audit_curve",
    "calibration",
    "check_conformance",
    "one_run_epsilon",
    "verify",
]
