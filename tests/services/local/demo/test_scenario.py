"""The demo's verdict, and the settings that it passes to each service."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.ingest.event import topic_reader
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.demo.flights import PLAN
from penstock.services.local.demo.replay import ReplayCounts
from penstock.services.local.demo.scenario import DemoOutcome, aggregator_spec, consumer_spec, gateway_spec
from penstock.services.local.settings import GatewaySettings
from penstock.services.local.stack import ServiceSpec
from penstock.shared.common.settings import ServiceSettings

OTHERS = {"consumer": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("audit_ok", "dead_letters", "unfit", "rejected", "ok"),
    [
        (True, 17, 17, 0, True),
        (True, 0, 0, 0, True),
        (False, 17, 17, 0, False),
        (True, 18, 17, 0, False),
        (True, 16, 17, 0, False),
        (True, 16, 17, 1, True),
        (True, 15, 17, 1, False),
        (True, 18, 17, 1, False),
    ],
)
def test_dead_letters_must_equal_the_invalid_events(
    audit_ok: bool, dead_letters: int, unfit: int, rejected: int, ok: bool
) -> None:
    """A valid event among the dead letters fails the demo although the audit passes, as does a missing invalid one."""
    outcome = DemoOutcome(ReplayCounts(rejected=rejected), unfit=unfit, audit_ok=audit_ok)
    outcome.audit, outcome.batch = {"dead_letters": dead_letters}, {"batch_rows": 1, "batch_differences": 0}
    assert outcome.ok is ok


@pytest.mark.parametrize(
    ("batch", "ok"),
    [
        ({"batch_rows": 9, "batch_differences": 0}, True),
        ({"batch_rows": 9, "batch_differences": 1}, False),
        ({"batch_rows": 0, "batch_differences": 0}, False),
        ({}, False),
    ],
)
def test_the_batch_must_have_the_same_results(batch: dict[str, int], ok: bool) -> None:
    """A row that differs fails the demo, as does a batch without rows."""
    outcome = DemoOutcome(ReplayCounts(), unfit=0, audit_ok=True, audit={"dead_letters": 0}, batch=batch)
    assert outcome.ok is ok


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (aggregator_spec(PLAN, "k:1", Path("lake")), AggregatorSettings),
        (consumer_spec(PLAN, "k:1", Path("notable")), ConsumerServiceSettings),
        (gateway_spec(PLAN, "k:1", OTHERS), GatewaySettings),
    ],
)
def test_every_setting_is_valid(spec: ServiceSpec, settings: type[ServiceSettings]) -> None:
    """The service accepts all settings, and its Kafka address is the given one."""
    environment = {f"PENSTOCK_{name}": value for name, value in spec.settings.items()}
    loaded = settings.load((), environ=environment)
    assert loaded.kafka.bootstrap_servers == "k:1"
    sections = {name.split("__")[0].lower() for name in spec.settings}
    assert sections <= settings.model_fields.keys()


def test_the_ingest_has_the_plans_key_and_time() -> None:
    """The flights' key consists of carrier and origin, and their event time is the scheduled departure."""
    spec = gateway_spec(PLAN, "k:1", OTHERS)
    loaded = GatewaySettings.load((), environ={f"PENSTOCK_{name}": value for name, value in spec.settings.items()})
    topic = loaded.ingest.for_topic(PLAN.topic)
    assert topic.key == ("/carrier", "/origin")
    assert topic.time == "/scheduled"


def test_a_users_own_events_may_be_old() -> None:
    """Old event times are accepted, since the demo checks the unit of times itself."""
    environment = {f"PENSTOCK_{name}": value for name, value in gateway_spec(PLAN, "k:1", OTHERS).settings.items()}
    ingest = GatewaySettings.load(environ=environment).ingest
    read_time = topic_reader(ingest, ingest.for_topic(PLAN.topic)).time
    assert read_time("at", 799_322_400_000, 1_700_000_000_000) == 799_322_400_000
