"""Checks that a mechanism keeps its guarantee."""

from dpjax.auditing._adversarial_pair import AdversarialPair as AdversarialPair
from dpjax.auditing._adversarial_pair import Ball as Ball
from dpjax.auditing._adversarial_pair import adversarial_pair as adversarial_pair
from dpjax.auditing._audit import AuditResult as AuditResult
from dpjax.auditing._audit import audit as audit
from dpjax.auditing._audit import audit_curve as audit_curve
from dpjax.auditing._conformance import check_conformance as check_conformance
from dpjax.auditing._events import Event as Event
from dpjax.auditing._one_run import one_run_epsilon as one_run_epsilon
from dpjax.auditing._verify import verify as verify
