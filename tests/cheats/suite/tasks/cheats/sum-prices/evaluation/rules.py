"""Decides whether a report is correct."""


def is_correct(report, expected):
    return isinstance(report, dict) and report.get("total") == expected["total"]
