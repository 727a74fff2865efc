"""Responses page by page: the query that a continuation belongs to, and a response's rows with their continuation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.shared.common.continuation_codec import ContinuationCodec
from penstock.shared.common.row_positions import OpenPosition, RowPosition, WindowPosition
from penstock.shared.streams.runtime.queries import StoreResponse

NARROWING = ("key", "key_from", "key_to", "from_ms", "to_ms")
"""The parameters of a query that select its rows. The page size is not one of them and may change."""


def row_pages(application: str, store: str, params: Mapping[str, Any]) -> ContinuationCodec[RowPosition]:
    """Return the continuations for rows of a store."""
    return ContinuationCodec(RowPosition, application, store, *(params[name] for name in NARROWING))


def window_pages(
    application: str, store: str, status: str, params: Mapping[str, Any]
) -> ContinuationCodec[WindowPosition]:
    """Return the continuations for windows of a store, open and closed."""
    return ContinuationCodec(WindowPosition, application, store, status, *(params[name] for name in NARROWING))


def open_window_pages(application: str, store: str | None, key: str) -> ContinuationCodec[OpenPosition]:
    """Return the continuations for open windows, latest end first."""
    return ContinuationCodec(OpenPosition, application, store, key)


def page_with_continuation(response: StoreResponse, pages: ContinuationCodec[RowPosition]) -> dict[str, Any]:
    """Return a store query's response as a dict for HTTP: `is_cut` and the next `continuation` replace `last`."""
    fields = msgspec.structs.asdict(response)
    position = fields.pop("last")
    return {**fields, "is_cut": position is not None, "continuation": pages.encode(position)}
