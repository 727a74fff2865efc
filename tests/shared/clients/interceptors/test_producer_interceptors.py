"""Producer interceptors are called in order, and their errors do not affect the record."""

from __future__ import annotations

from penstock.shared.clients.interceptors.interceptors import ProducerInterceptor, ProducerInterceptors
from penstock.shared.common.errors import DeliveryTimeout
from penstock.shared.common.records import Headers, ProducerRecord, RecordMetadata


class Adds(ProducerInterceptor):
    def __init__(self, suffix: bytes, *, fails: bool = False) -> None:
        self._suffix, self._fails = suffix, fails
        self.heard: list[RecordMetadata | Exception | None] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        if self._fails:
            raise RuntimeError
        return ProducerRecord(record.topic, (record.value or b"") + self._suffix)

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        self.heard.append(metadata or error)
        self.headers = headers
        if self._fails:
            raise RuntimeError


def test_a_chain_goes_on_past_one_that_raises() -> None:
    """Each interceptor gets the previous one's result. One that raises is skipped."""
    chain = [Adds(b"a"), Adds(b"b", fails=True), Adds(b"c")]
    interceptors = ProducerInterceptors(chain)
    assert interceptors.on_send(ProducerRecord("t", b"")).value == b"ac"
    interceptors.on_acknowledgement(None, None, ())
    assert [len(i.heard) for i in chain] == [1, 1, 1]
    assert interceptors
    assert not ProducerInterceptors([])


def test_interceptors_are_called_before_the_callback() -> None:
    """Interceptors and callback get the same result. Interceptors are called without a callback too."""
    chain = [Adds(b"a", fails=True)]
    order: list[int] = []
    error = DeliveryTimeout("late")
    ProducerInterceptors(chain).observed(ProducerRecord("t", b""), lambda *_: order.append(len(chain[0].heard)))(
        None, error
    )
    ProducerInterceptors(chain).observed(ProducerRecord("t", b""), None)(RecordMetadata("t", 0, 5, 0), None)
    assert order == [1]
    assert chain[0].heard == [error, RecordMetadata("t", 0, 5, 0)]


def test_the_base_changes_nothing() -> None:
    """An interceptor that overrides nothing leaves records unchanged."""
    record = ProducerRecord("t", b"v")
    assert ProducerInterceptors([ProducerInterceptor()]).on_send(record) is record
    ProducerInterceptor().on_acknowledgement(None, None, ())


def test_acknowledgements_have_the_headers_of_the_record() -> None:
    """The acknowledgement has the headers that the record was sent with."""
    interceptor, headers = Adds(b"a"), (("number", b"1"),)
    ProducerInterceptors([interceptor]).observed(ProducerRecord("t", b"", headers=headers), None)(
        None, DeliveryTimeout("late")
    )
    assert interceptor.headers == headers


def test_an_interceptor_that_returns_no_record() -> None:
    """A missing return value is skipped like an error: the record is sent unchanged."""

    class Forgets(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return None  # type: ignore[return-value]

    assert ProducerInterceptors([Adds(b"a"), Forgets(), Adds(b"b")]).on_send(ProducerRecord("t", b"")).value == b"ab"
