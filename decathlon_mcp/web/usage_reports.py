"""Reports about their own use that programs and pages send, and what Chromium asks for itself.

They are no part of what a task sees of the web. They differ each time and their times depend on the machine,
so that no recording could answer them. The proxy accepts them in every mode: they
are not sent, not recorded and not counted.
"""

from __future__ import annotations

from urllib.parse import urlsplit

HOSTS = (
    # Microsoft's libraries, such as ONNX Runtime, which converters of PDF files load.
    *("events.data.microsoft.com", "in.applicationinsights.azure.com", "dc.services.visualstudio.com"),
    # Libraries and pages.
    *("google-analytics.com", "analytics.google.com", "stats.g.doubleclick.net"),
    *("ingest.sentry.io", "ingest.us.sentry.io", "ingest.de.sentry.io"),
    *("i.posthog.com", "app.posthog.com", "api.segment.io"),
    *("api.mixpanel.com", "api-js.mixpanel.com", "api.amplitude.com", "api2.amplitude.com"),
    # Chromium: updates, the time, experiments, dictionaries, forms, and lists of dangerous sites.
    *("update.googleapis.com", "safebrowsing.googleapis.com", "optimizationguide-pa.googleapis.com"),
    *("clients2.google.com", "clientservices.googleapis.com", "content-autofill.googleapis.com"),
    *("redirector.gvt1.com", "edgedl.me.gvt1.com"),
)
"""Hosts that only receive such requests, with their subdomains."""


def is_usage_report(url: str) -> bool:
    """Whether a request to this address is one of these."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return False
    return any(host == name or host.endswith(f".{name}") for name in HOSTS)
