"""Says which mutants run."""

from mutation.choice import SENTENCE


def pytest_report_header():
    return SENTENCE
