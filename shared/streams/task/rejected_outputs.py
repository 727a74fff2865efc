"""The dead letter of an output: what a node could not take of what a store, a punctuation or a commit had given it.

It looks like any dead letter but for what it cannot have: there is no source record to replay, since a store has
counted it. So it has no `penstock.dlq.topic`, `.partition` and `.offset`; its key and value are the output's (text and
bytes as they are, anything else as JSON, a result flat), and its headers say which node refused it, behind which store,
of which window, and, as `penstock.origin.*`, which source record brought it about, where one did.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.shared.clients.connection import record_size
from penstock.shared.clients.consumer.dead_letters import (
    ATTEMPTS,
    EXCEPTION,
    GROUP,
    MESSAGE,
    NODE,
    STAGE,
    STORE,
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
    DeadLetter,
    header_text,
)
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.streams.record import Record, WindowKey, WindowResult
from penstock.shared.streams.task.repartition_headers import origin_headers
from penstock.shared.streams.windows.late_records import as_bytes
from penstock.shared.streams.windows.window_limits import name_window


class Emitted(NamedTuple):
    """What `node` was given, and what is known of where it came from; `place` is the source record's."""

    record: Record
    node: str
    store: str | None
    window: WindowKey | None
    place: str | None

    def __str__(self) -> str:
        parts = [f"node {self.node!r}"]
        if self.window is not None:
            parts.append(name_window(self.store, *self.window))
        elif self.store is not None:
            parts.append(f"store {self.store!r}")
        return ", ".join([*parts, self.place or "of no source record"])


def refused_output(
    topic: str,
    emitted: Emitted,
    source: ConsumerRecord | None,
    stage: str,
    error: Exception,
    application: str,
    record_bytes_max: int,
) -> ProducerRecord:
    """The dead letter; a value that makes it larger than `record_bytes_max` is left out."""
    record, window = emitted.record, emitted.window
    letter = DeadLetter.of(source or ConsumerRecord(topic, 0, 0, 0, None, None), stage, error, 1, application)
    said = {
        STAGE: stage,
        EXCEPTION: letter.exception,
        MESSAGE: letter.message,
        ATTEMPTS: "1",
        GROUP: application,
        NODE: emitted.node,
        TIMESTAMP: str(record.timestamp),
    }
    if emitted.store is not None:
        said[STORE] = emitted.store
    if window is not None:
        said |= {WINDOW_START: str(window.start), WINDOW_END: str(window.end)}
    headers = (*record.headers, *((name, header_text(text)) for name, text in said.items()))
    if source is not None:
        headers += origin_headers(source)
    key = as_bytes(window.key if window is not None else record.key)
    value = record.value.to_json() if isinstance(record.value, WindowResult) else as_bytes(record.value)
    if record_size(key, value, list(headers)) > record_bytes_max:
        value = None
    return ProducerRecord(topic, value, key, headers)
