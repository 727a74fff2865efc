"""The dead letter of a rejected output: a record of a store, a punctuation or a commit that a node could not process.

It looks like any dead letter, except that no source record can be replayed, since a store has counted it. So it lacks
the headers `penstock.dlq.topic`, `.partition` and `.offset`. Its key and value are the output's: text and bytes as they
are, anything else as JSON, a result as a flat object. Its headers name the node that rejected it, the store and the
window. If a source record caused it, `penstock.origin.*` name that record.
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
    """The record that `node` was given, and its known origin; `source` has the source record's coordinates."""

    record: Record
    node: str
    store: str | None
    window: WindowKey | None
    source: str | None

    def __str__(self) -> str:
        parts = [f"node {self.node!r}"]
        if self.window is not None:
            parts.append(name_window(self.store, *self.window))
        elif self.store is not None:
            parts.append(f"store {self.store!r}")
        return ", ".join([*parts, self.source or "of no source record"])


def output_dead_letter(
    topic: str,
    emitted: Emitted,
    source: ConsumerRecord | None,
    stage: str,
    error: Exception,
    application: str,
    record_bytes_max: int,
) -> ProducerRecord:
    """Return the dead letter; a value that makes it larger than `record_bytes_max` is left out."""
    record, window = emitted.record, emitted.window
    dead_letter = DeadLetter.of(source or ConsumerRecord(topic, 0, 0, 0, None, None), stage, error, 1, application)
    texts = {
        STAGE: stage,
        EXCEPTION: dead_letter.exception,
        MESSAGE: dead_letter.message,
        ATTEMPTS: "1",
        GROUP: application,
        NODE: emitted.node,
        TIMESTAMP: str(record.timestamp),
    }
    if emitted.store is not None:
        texts[STORE] = emitted.store
    if window is not None:
        texts |= {WINDOW_START: str(window.start), WINDOW_END: str(window.end)}
    headers = (*record.headers, *((name, header_text(text)) for name, text in texts.items()))
    if source is not None:
        headers += origin_headers(source)
    key = as_bytes(window.key if window is not None else record.key)
    value = record.value.to_json() if isinstance(record.value, WindowResult) else as_bytes(record.value)
    if record_size(key, value, list(headers)) > record_bytes_max:
        value = None
    return ProducerRecord(topic, value, key, headers)
