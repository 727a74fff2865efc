"""The conversion of records: the converters between Kafka and Connect, and the chain of transforms."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
import structlog.testing

from penstock.connect.transforms import Filter, HoistFieldValue, RecordIsTombstone
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import NO_TIMESTAMP, Columns, ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.converters.json import JsonConverter
from penstock.shared.connect.converters.plain import StringConverter
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.transformation_chain import TransformationChain, TransformationStage
from tests.shared.connect.harness import (
    STRING,
    RecordingSink,
    RecordingSinkTask,
    RecordingSource,
    RecordingSourceTask,
    running,
    source_record,
)

UNUSED = cast(Any, None)

HOIST = "org.apache.kafka.connect.transforms.HoistField$Value"
PROPS = {
    "transforms": "one,two",
    "transforms.one.type": HOIST,
    "transforms.one.field": "a",
    "transforms.two.type": "penstock.connect.transforms.HoistFieldValue",
    "transforms.two.field": "b",
}


async def test_columns_and_single_records_are_converted_alike() -> None:
    """A record without a timestamp has None, and each record has its coordinates in Kafka."""
    converter = StringConverter()
    conversion = Conversion(converter, converter, UNUSED, TransformationChain([]), UNUSED, UNUSED, UNUSED, UNUSED)
    found = [
        ConsumerRecord("t", 1, offset, timestamp, key, b"v", ())
        for offset, timestamp, key in [(5, NO_TIMESTAMP, b"a"), (6, 0, None), (8, 1_000, b"b")]
    ]
    columns = Columns.of(found)
    at_once = conversion._convert_columns_at_once(columns)
    assert at_once is not None
    assert at_once == [await conversion._sink_record(record) for record in columns.records()]
    assert [record.timestamp for record in at_once] == [None, 0, 1_000]
    assert [record.coordinates for record in at_once] == ["t-1@5", "t-1@6", "t-1@8"]


async def test_a_connectors_header_converter_overrides_the_workers() -> None:
    """A connector's header converter overrides the worker's, which infers types."""
    for settings, wanted in (({}, 7), ({"header_converter": STRING}, "7")):
        async with running() as run:
            async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
                await producer.send("t", b"a", headers=[("h", b"7")])
            await run.run(RecordingSink, topics="t", **settings)
            await run.until(lambda: RecordingSinkTask.made and RecordingSinkTask.made[-1].records)
            assert [header.value for header in RecordingSinkTask.made[-1].records[0].headers] == [wanted]


class Panic(BaseException):
    """An error as a panic in a Rust library raises it: pyo3_runtime.PanicException is no Exception."""


async def test_a_panic_of_a_converter_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose converter raises a BaseException is shown as FAILED, with its trace."""

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(StringConverter, "from_connect_data", panic)
    async with running() as run:
        id = await run.run(RecordingSource)
        await run.until(lambda: RecordingSourceTask.made)
        RecordingSourceTask.made[0].batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.listener.of(id) == ["startup", "failure"])
        assert "Panic: index out of bounds" in run.listener.traces[0]


def chain(**more: str) -> TransformationChain:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return TransformationChain.of(Plugins.installed(), {**PROPS, **named})


async def transformed(chain: TransformationChain, value: Any) -> Any:
    """Return the value of a transformed source record, or None if a transform dropped the record."""
    converter = JsonConverter()
    converter.configure({"schemas.enable": "false"}, False)
    conversion = Conversion(converter, converter, UNUSED, chain, UNUSED, UNUSED, UNUSED, UNUSED)
    found = await conversion.producer_record(source_record(value, 1))
    return None if found is None else json.loads(found.value or b"null")


async def test_transforms_are_applied_in_order() -> None:
    """Transforms are applied in order, with Kafka's or our class names."""
    assert await transformed(chain(), 1) == {"b": {"a": 1}}


async def test_predicates_select_records() -> None:
    """A transform applies to records for which its predicate is true, or false if negated."""
    bound = {
        "predicates": "gone",
        "predicates__gone__type": "RecordIsTombstone",
        "transforms__one__predicate": "gone ",  # a properties file keeps the blank
        "transforms__one__negate": "true",
        "transforms__two__type": "Filter",
        "transforms__two__predicate": "gone",
    }
    made = chain(**bound)
    assert await transformed(made, None) is None
    assert await transformed(made, 1) == {"a": 1}
    assert await transformed(chain(**bound, transforms__two__negate="true"), 1) is None
    made.close()


@pytest.mark.parametrize(("topic", "matches"), [("orders", True), ("clicks", False)])
def test_a_predicate_may_return_any_truth_value(topic: str, matches: bool) -> None:
    """A predicate that returns a match or None, as the functions of `re` do, selects the records with a match."""

    class Orders(RecordIsTombstone):
        def test(self, record: ConnectRecord) -> bool:
            return cast(bool, re.match("orders", record.topic))

    one = source_record(1, 1, topic)
    assert (TransformationStage(Filter(), Orders()).apply(one) is None) is matches
    assert (TransformationStage(Filter(), Orders(), negate=True).apply(one) is None) is not matches


def test_an_error_of_close_is_logged() -> None:
    """If a transform cannot be closed, this is logged, and the other transforms are closed."""
    closed = []

    class Closing(HoistFieldValue):
        def close(self) -> None:
            closed.append(self)
            raise ValueError("no connection")

    with structlog.testing.capture_logs() as logged:
        TransformationChain([TransformationStage(Closing()), TransformationStage(Closing())]).close()
    assert len(closed) == 2
    assert [line["error"] for line in logged] == ["ValueError: no connection"] * 2


def test_unknown_classes_and_predicates_are_errors() -> None:
    """An unknown class or predicate is a ConfigError."""
    with pytest.raises(ConfigError, match=r"no\.Such"):
        chain(transforms__one__type="no.Such")
    with pytest.raises(ConfigError, match="listed in 'predicates'"):
        chain(transforms__one__predicate="nope")
