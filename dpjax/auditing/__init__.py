"""Checks that a mechanism keeps its guarantee, and measures how much it reveals.

Three functions check a mechanism. They differ in their inputs and in their results.

- `audit` samples outputs for two values, and returns the largest lower bound on epsilon, or on
  delta, that it can prove. It does not compare the bound with a claim.
- `verify` runs `audit`, and raises an error if the bound refutes a claim. It is for test suites,
  and for any randomized function, including functions that dpjax did not make.
- `check_conformance` takes a factory of mechanisms, and checks everything that the mechanisms claim
  about themselves. It returns a report, or raises an error on the first failed check. It is for
  mechanisms that you write for dpjax.

`calibration` checks inference from releases: whether posteriors contain the truth as often as they
claim.
"""

from dpjax.auditing._adversarial_pair import AdversarialPair, adversarial_pair
from dpjax.auditing._audit import AuditResult, audit, audit_curve, verify
from dpjax.auditing._calibration import Calibration, calibration
from dpjax.auditing._conformance import ConformanceReport, check_conformance
from dpjax.auditing._events import Event
from dpjax.auditing._one_run import one_run_epsilon

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
