"""Answers page by page: which question a continuation belongs to, and an answer's rows with the one that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.shared.common.continuation import Continuations, LivePlace, RowPlace, WindowPlace
from penstock.shared.streams.queries import StoreAnswer

NARROWING = ("key", "key_from", "key_to", "from_ms", "to_ms")
"""What of a question decides which rows there are; how many of them a page has may change."""


def row_pages(application: str, store: str, question: Mapping[str, Any]) -> Continuations[RowPlace]:
    """Of the rows of a store."""
    return Continuations(RowPlace, application, store, *(question[name] for name in NARROWING))


def window_pages(application: str, store: str, status: str, question: Mapping[str, Any]) -> Continuations[WindowPlace]:
    """Of the windows of a store, open and closed."""
    return Continuations(WindowPlace, application, store, status, *(question[name] for name in NARROWING))


def live_pages(application: str, store: str | None, key: str) -> Continuations[LivePlace]:
    """Of the live windows, those that end last first."""
    return Continuations(LivePlace, application, store, key)


def told(answer: StoreAnswer, pages: Continuations[RowPlace]) -> dict[str, Any]:
    """What is answered over HTTP."""
    said = msgspec.structs.asdict(answer)
    place = said.pop("last")
    return {**said, "is_cut": place is not None, "continuation": pages.text(place)}
