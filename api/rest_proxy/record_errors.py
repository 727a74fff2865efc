"""How REST Proxy v2 and v3 report the error of a record: its error code, status and message."""

from __future__ import annotations

from penstock.api.http.problem import (
    NON_RETRIABLE,
    RETRIABLE,
    UNKNOWN_PARTITION,
    kind_of_record_error,
    rest_error_code,
    retry_after_header,
)
from penstock.api.http.status_codes import BAD_REQUEST, INTERNAL_SERVER_ERROR, UNPROCESSABLE_CONTENT
from penstock.api.ingest.event import EventRejected
from penstock.shared.common.errors import (
    DataError,
    PenstockError,
    RetriableError,
    UnknownTopicOrPartition,
)


class MalformedRecord(EventRejected):
    """A record in v3 is not valid JSON, or not of a record's form: a field is unknown, missing or of another type."""


def error_code_of(error: BaseException) -> int:
    """Return REST Proxy's error code of a record's error.

    >>> from penstock.shared.common.errors import KafkaTimeout
    >>> error_code_of(UnknownTopicOrPartition()), error_code_of(DataError()), error_code_of(KafkaTimeout())
    (40402, 422, 50003)
    """
    if isinstance(error, UnknownTopicOrPartition):
        return UNKNOWN_PARTITION
    kind = kind_of_record_error(error)
    if kind.status >= INTERNAL_SERVER_ERROR:
        return RETRIABLE if isinstance(error, RetriableError) or kind.retry_after_s is not None else NON_RETRIABLE
    if isinstance(error, DataError) and not isinstance(error, MalformedRecord) and kind.status == BAD_REQUEST:
        return UNPROCESSABLE_CONTENT
    return rest_error_code(kind, "/v3/")


def error_status_of(error: BaseException) -> tuple[int, dict[str, str]]:
    """Return the status and headers of a response that reports only this record's error.

    >>> from penstock.shared.common.errors import KafkaTimeout
    >>> error_status_of(UnknownTopicOrPartition()), error_status_of(DataError()), error_status_of(KafkaTimeout())
    ((404, {}), (422, {}), (504, {'Retry-After': '5'}))
    """
    kind = kind_of_record_error(error)
    code = error_code_of(error)
    status = kind.status
    if status < INTERNAL_SERVER_ERROR:
        # A code such as 40402 begins with its status.
        status = code if code < 1_000 else code // 100
    return status, retry_after_header(kind.retry_after_s)


def error_message_of(error: BaseException) -> str:
    """Return the message of a record's error, or a fixed text if it has none or is not a PenstockError."""
    return str(error) if isinstance(error, PenstockError) and str(error) else "unexpected error"
