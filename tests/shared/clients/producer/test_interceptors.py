"""Interceptors: called in order, their own errors kept from the record."""

from __future__ import annotations

from shared.clients.producer.interceptors import Interceptors, ProducerInterceptor
from shared.common.records import ProducerRecord, RecordMetadata


class Adds(ProducerInterceptor):
    def __init__(self, suffix: bytes, *, fails: bool = False) -> None:
        self._suffix, self._fails = suffix, fails
        self.heard = 0

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        if self._fails:
            raise RuntimeError
        return ProducerRecord(record.topic, (record.value or b"") + self._suffix)

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        self.heard += 1
        if self._fails:
            raise RuntimeError


def test_a_chain_goes_on_past_one_that_raises() -> None:
    """Each interceptor gets what the one before made; one that raises is passed over."""
    chain = [Adds(b"a"), Adds(b"b", fails=True), Adds(b"c")]
    interceptors = Interceptors(chain)
    assert interceptors.on_send(ProducerRecord("t", b"")).value == b"ac"
    interceptors.on_acknowledgement(None, None)
    assert [i.heard for i in chain] == [1, 1, 1]
    assert not Interceptors([])
