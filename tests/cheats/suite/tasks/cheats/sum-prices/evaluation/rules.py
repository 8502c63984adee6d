"""What counts as right."""


def is_right(report, wanted):
    return isinstance(report, dict) and report.get("total") == wanted["total"]
