"""`penstock sessions`: windows by key and time, open and closed, as of the newest commit, with or without a running
aggregator. They are found by a query of stored windows (`penstock.services.aggregator.stored_windows`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.services.aggregator.changelog_tail import ChangelogLocation
from penstock.services.aggregator.continuations import window_pages
from penstock.services.aggregator.key_filter import key_text
from penstock.services.aggregator.settings import SessionsSettings
from penstock.services.aggregator.stored_windows import StoredWindow, StoredWindowsQuery, WindowQueryOptions
from penstock.services.exit_status import ExitStatus
from penstock.services.terminal_tables import console_for, plain
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import (
    ConfigError,
    PenstockError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import configure
from penstock.shared.common.time_text import time_ms, utc_text
from penstock.shared.streams.changelog.store_schema import StoreSchema

# Wider keys and results of aggregations are folded, so that the table stays readable.
COLUMN_WIDTH_MAX = 40
PROGRAM = "penstock sessions"
ONLY_OPEN = "lake: unset: these are only the open windows"
FROM_CHANGELOG = (
    "{}: the result has only the windows in the changelog. It is complete if there was no compaction yet. Otherwise "
    "set lake and application to the aggregator's values"
)


def print_windows(store: StoreSchema, found: Sequence[StoredWindow], console: Console | None = None) -> None:
    """Print the windows that `penstock sessions` has found as a table, with times in the format of `--from`."""
    table = Table(title=f"{store.name}: {len(found)} windows")
    names = [a.name for a in store.shown_aggregations()]
    table.add_column("key", max_width=COLUMN_WIDTH_MAX)
    for name in ("start (UTC)", "end (UTC)", "status"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(name, max_width=COLUMN_WIDTH_MAX)
    for one in found:
        times = map(utc_text, one[1:3])
        values = (msgspec.json.encode(one.results.get(name)).decode() for name in names)
        row = (key_text(one.key), *times, one.status, *values)
        table.add_row(*map(plain, row))
    (console or console_for(table)).print(table)


def sessions_query_options(settings: SessionsSettings) -> WindowQueryOptions:
    """Return the query of the command line of `penstock sessions`."""
    return WindowQueryOptions(
        location=ChangelogLocation(
            settings.kafka, settings.application, settings.lake, settings.lake_options, lake_name="lake"
        ),
        store=settings.store,
        keys=settings.keys,
        time_range=(time_ms(settings.from_), time_ms(settings.to)),
        status=settings.status,
        rows_max=settings.rows_max,
        timeout_ms=settings.kafka_timeout_ms,
        timeout_name="kafka_timeout_ms",
    )


def _key_and_time_filter(settings: SessionsSettings) -> dict[str, Any]:
    key_range = dict(zip(("key_from", "key_to"), settings.keys, strict=True))
    return {"key": None, **key_range, "from_ms": time_ms(settings.from_), "to_ms": time_ms(settings.to)}


def main(arguments: list[str]) -> int:
    """Run `penstock sessions`: print the windows.

    Returns the exit status: 0 even without windows, 2 for a wrong setting, a query of too many windows or a changelog
    without a commit, 1 after any other PenstockError.
    """
    given = ["--json-line" if argument == "--json" else argument for argument in arguments]
    try:
        settings = SessionsSettings.load(given, program=PROGRAM)
        configure(settings.log, "sessions")
        pages = window_pages(
            settings.application, settings.store or "", settings.status, _key_and_time_filter(settings)
        )
        # No request to Kafka may take longer than the query may.
        limit_ms = min(settings.kafka.request_timeout_ms, settings.kafka_timeout_ms)
        quick = settings.kafka.model_copy(update={"request_timeout_ms": limit_ms})
        options = sessions_query_options(settings.model_copy(update={"kafka": quick}))
        query = StoredWindowsQuery(options, pages.decode(settings.continuation))
        store, found = asyncio.run(query.run())
    except (ConfigError, WrongContinuation) as e:
        print(str(e), file=sys.stderr)
        return ExitStatus.WRONG_SETTING
    except UnknownTopicOrPartition as e:
        message = "set application to the aggregator's value; the aggregator creates the topic when it first starts"
        print(f"{type(e).__name__}: {e}: {message}", file=sys.stderr)
        return ExitStatus.FAILED
    except PenstockError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return ExitStatus.FAILED
    if settings.lake is None:
        print(ONLY_OPEN, file=sys.stderr)
    if query.missing is not None:
        print(FROM_CHANGELOG.format(query.missing), file=sys.stderr)
    if settings.json_line:
        for one in found:
            print(msgspec.json.encode(one._asdict()).decode())
    else:
        print_windows(store, found)
    if query.last is not None:
        print(f"there are more: --continuation {pages.encode(query.last)}", file=sys.stderr)
    return 0
