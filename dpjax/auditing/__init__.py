"""Checks that a mechanism keeps its promise."""

from dpjax.auditing._conformance import check_conformance as check_conformance
