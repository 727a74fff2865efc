"""Merges the metrics of several workers: each sample gets the label `worker`, each family appears once.

>>> page = "# HELP penstock_x_total X.\\n# TYPE penstock_x_total counter\\npenstock_x_total{topic=\\"t\\"} 2.0\\n"
>>> print(merged({1: page, 2: page}).decode().rstrip())
# HELP penstock_x_total X.
# TYPE penstock_x_total counter
penstock_x_total{topic="t",worker="1"} 2.0
penstock_x_total{topic="t",worker="2"} 2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.shared.common import metrics


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(texts: Mapping[int, str]) -> bytes:
    """Merge the workers' metrics by number. Raises ValueError for a text that is not in Prometheus' format."""
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return metrics.render(registry)
