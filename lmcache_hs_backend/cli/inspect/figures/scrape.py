"""The counters of a running engine, from where it serves its Prometheus metrics."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from lmcache_hs_backend.cli.console import CommandError

PREFIX = "lmcache:hs_"
_TIMEOUT_SEC = 10
_MAX_BYTES = 64 << 20


def scrape(url: str) -> dict[str, float]:
    """Our metrics by the names of ``stats()``, summed over workers, and what follows from them.

    Raises CommandError when there is nothing of ours at ``url``.
    """
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--metrics {url}: must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SEC) as answer:
            text = answer.read(_MAX_BYTES).decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CommandError(f"--metrics {url} cannot be read: {getattr(error, 'reason', error)}") from None
    figures: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                    name = sample.name[len(PREFIX) :].removesuffix("_total")
                    figures[name] = figures.get(name, 0.0) + sample.value
    except ValueError as error:
        raise CommandError(f"--metrics {url} does not serve Prometheus metrics: {error}") from None
    if not figures:
        raise CommandError(f"--metrics {url} has no metric whose name begins with {PREFIX}: no engine with the plugin")
    return {name: value for name, value in figures.items() if value} | _derived(figures)


def _derived(figures: dict[str, float]) -> dict[str, float]:
    hot, cold = figures.get("hits_hot", 0.0), figures.get("hits_cold", 0.0)
    derived = {}
    if hot + cold:
        derived["share_served_from_ram"] = round(hot / (hot + cold), 4)
    for name in ("store", "retrieve", "disk_read", "disk_write"):
        count = figures.get(f"{name}_seconds_count", 0.0)
        if count:
            derived[f"{name}_seconds_mean"] = figures.get(f"{name}_seconds_sum", 0.0) / count
    return derived
