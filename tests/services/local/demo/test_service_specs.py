"""The settings that the demo passes to each service."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.ingest.event import topic_reader
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.demo.flights import PLAN
from penstock.services.local.demo.service_specs import aggregator_spec, consumer_spec, gateway_spec
from penstock.services.local.settings import GatewaySettings
from penstock.services.local.stack import ServiceSpec
from penstock.shared.common.settings import ServiceSettings

OTHERS = {"consumer": "http://127.0.0.1:1"}


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
