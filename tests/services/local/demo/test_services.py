"""The demo's services: the settings that they are given, and the handler that stores notable sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.ingest.event import topic_reader
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.demo.flights import PLAN
from penstock.services.local.demo.handler import FILE_VARIABLE, count_notable_sessions, store
from penstock.services.local.demo.service_specs import aggregator_spec, consumer_spec, gateway_spec
from penstock.services.local.settings import GatewaySettings
from penstock.services.local.stack import ServiceSpec
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ConsumerRecord
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


def record(value: bytes | None) -> ConsumerRecord:
    return ConsumerRecord("banks", 0, 0, 0, b"k", value)


async def test_only_notable_sessions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notable session is a line in the configured file, and handling it twice does not change the count."""
    path = tmp_path / "notable.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    assert count_notable_sessions(path) == 0
    await store(record(b'{"key":"a","start":0,"end":9,"flights":3,"mean_delay":4.5}'))
    for _ in range(2):
        await store(record(b'{"key":"b","start":0,"end":9,"flights":3,"mean_delay":95.0}'))
    await store(record(b'{"key":"c","start":0,"end":9,"events":77}'))
    assert count_notable_sessions(path) == 2
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("value", [None, b"", b"[]", b"{", b"[" * 100_000])
async def test_an_invalid_session_is_an_error(value: bytes | None) -> None:
    """An invalid session is a DataError, so the runner writes a dead letter instead of retrying."""
    with pytest.raises(DataError, match="not a session"):
        await store(record(value))
