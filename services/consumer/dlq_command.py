"""`penstock dlq list|replay`: lists the dead letters of a topic, and sends them back to it.

The argument is the source topic or its dead-letter topic. Connection settings come from `PENSTOCK_KAFKA__…` and the
TOML file, as for every service. `--bootstrap-servers` overrides only the brokers' addresses.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from penstock.services.command_line import run_app
from penstock.services.consumer.settings import DlqSettings
from penstock.services.terminal_tables import console_for, plain
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.dead_letters.dead_letter import DeadLetterStage
from penstock.shared.clients.dead_letters.dead_letter_log import (
    DeadLetterEntry,
    DeadLetterLog,
    Wanted,
    dead_letter_filter,
    replay_producer_settings,
)
from penstock.shared.clients.producer import Producer
from penstock.shared.common import log, topic_names
from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.common.records import coordinates_of
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.time_text import utc_text

TEXT_MAX = 60
"""The most characters of a cell in the table; `--json` prints all of them."""
TOPICS_SHOWN_MAX = 10
"""Dead-letter topics that an error names."""

Named = tuple[str, str | None]
"""The topic on the command line, and its dead-letter topic if there is one on the command line."""


app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Dead letters: list them, and replay them to their source."
)

Topic = Annotated[str, typer.Argument(help="the source topic, or its dead-letter topic")]
Servers = Annotated[str | None, typer.Option("--bootstrap-servers", help="host:port, comma-separated")]
Config = Annotated[str | None, typer.Option("--config", help="TOML file")]
DeadLetterTopic = Annotated[str | None, typer.Option(help="default: TOPIC-dlq. If it is shared: only those of TOPIC")]
Stage = Annotated[DeadLetterStage | None, typer.Option(help="only dead letters of this stage")]
ExceptionName = Annotated[str | None, typer.Option("--exception", help="only this exception class")]
Partitions = Annotated[list[int] | None, typer.Option("--partition", help="only this source partition; repeatable")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line")]


@app.command("list")
def list_command(
    topic: Topic,
    bootstrap_servers: Servers = None,
    config: Config = None,
    dead_letter_topic: DeadLetterTopic = None,
    stage: Stage = None,
    exception: ExceptionName = None,
    partition: Partitions = None,
    pending: Annotated[bool, typer.Option(help="only dead letters that were not replayed")] = False,
    limit: Annotated[int, typer.Option(min=1)] = 100,
    json: Json = False,
) -> None:
    """List dead letters with their reasons, oldest first within each partition."""
    wanted = dead_letter_filter(stage, exception, partition or (), _source_of(topic, dead_letter_topic))

    def is_listed(entry: DeadLetterEntry) -> bool:
        return not (pending and entry.replayed) and (entry.dead_letter is None or wanted(entry.dead_letter))

    entries, more = _run_dlq_command(
        lambda kafka: _list_dead_letters(kafka, (topic, dead_letter_topic), is_listed, limit, needs_progress=pending),
        bootstrap_servers,
        config,
    )
    if json:
        for entry in entries:
            sys.stdout.write(msgspec.json.encode(_entry_as_json(entry)).decode() + "\n")
    else:
        _print_table(entries)
    if more:
        typer.echo(f"only the first {limit} are shown; raise --limit for more", err=True)


@app.command("replay")
def replay_command(
    topic: Topic,
    bootstrap_servers: Servers = None,
    config: Config = None,
    dead_letter_topic: DeadLetterTopic = None,
    stage: Stage = None,
    exception: ExceptionName = None,
    partition: Partitions = None,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of records to send")] = 10_000,
    include_replayed: Annotated[bool, typer.Option(help="also records that were replayed before")] = False,
    dry_run: Annotated[bool, typer.Option(help="show what would be sent, and send nothing")] = False,
    json: Json = False,
) -> None:
    """Send dead letters back to their source topics: raw key and value, original headers and timestamp."""
    target = (topic, dead_letter_topic)
    wanted = dead_letter_filter(stage, exception, partition or (), _source_of(topic, dead_letter_topic))
    if dry_run:
        entries, _ = _run_dlq_command(
            lambda kafka: _list_dead_letters(
                kafka,
                target,
                lambda entry: entry.is_replayable(wanted, include_replayed=include_replayed),
                limit,
                needs_progress=not include_replayed,
            ),
            bootstrap_servers,
            config,
        )
        if not json:
            _print_table(entries)
        typer.echo(msgspec.json.encode({"would_send": len(entries)}) if json else f"would send {len(entries)}")
        return
    result = _run_dlq_command(
        lambda kafka: _replay_dead_letters(kafka, target, wanted, limit, include_replayed), bootstrap_servers, config
    )
    if json:
        typer.echo(msgspec.json.encode(result))
    else:
        typer.echo(
            f"sent {result.sent}, failed {result.failed}, skipped {result.skipped}, not dead letters {result.faults}"
        )
        for error in result.errors:
            typer.echo(error, err=True)
    if result.failed:
        raise typer.Exit(1)


def find_dead_letter_topic(topic: str, existing: Collection[str]) -> str:
    """Return the topic that `penstock dlq` reads: the dead-letter topic of `topic` if there is one.

    Otherwise, returns `topic` itself if it is a dead-letter topic.

    Raises UnknownTopicOrPartition in all other cases. The message names the expected topic and some existing
    dead-letter topics.

    >>> find_dead_letter_topic("clicks", ["clicks", "clicks-dlq"]), find_dead_letter_topic("clicks-dlq", ["clicks-dlq"])
    ('clicks-dlq', 'clicks-dlq')
    """
    own = topic_names.dead_letter_topic(topic)
    if own in existing:
        return own
    if topic in existing and topic.endswith(topic_names.DEAD_LETTER_SUFFIX):
        return topic
    others = sorted(name for name in existing if name.endswith(topic_names.DEAD_LETTER_SUFFIX))
    shown = ", ".join(others[:TOPICS_SHOWN_MAX]) + (", …" if len(others) > TOPICS_SHOWN_MAX else "")
    raise UnknownTopicOrPartition(
        f"there is no topic {own}: pass the source topic, or its dead-letter topic with --dead-letter-topic "
        f"({f'there are {shown}' if others else f'no topic ends in {topic_names.DEAD_LETTER_SUFFIX}'})"
    )


def _source_of(topic: str, dead_letter_topic: str | None) -> str | None:
    """Return the source topic if it is named beside its dead-letter topic, which other sources may share."""
    return None if dead_letter_topic in (None, topic) else topic


async def _dead_letter_topic_of(kafka: KafkaSettings, topic: str, dead_letter_topic: str | None) -> str:
    if dead_letter_topic is not None:
        return dead_letter_topic
    async with Admin(kafka) as admin:
        return find_dead_letter_topic(topic, await admin.list_topics())


async def _list_dead_letters(
    kafka: KafkaSettings,
    named: Named,
    is_listed: Callable[[DeadLetterEntry], bool],
    limit: int,
    *,
    needs_progress: bool,
) -> tuple[list[DeadLetterEntry], bool]:
    found: list[DeadLetterEntry] = []
    topic = await _dead_letter_topic_of(kafka, *named)
    async with DeadLetterLog(kafka, topic) as dead_letters, aclosing(dead_letters.entries()) as entries:
        if needs_progress:
            _report_missing_progress(dead_letters)
        async for entry in entries:
            if not is_listed(entry):
                continue
            if len(found) == limit:
                return found, True
            found.append(entry)
    return found, False


async def _replay_dead_letters(
    kafka: KafkaSettings, named: Named, wanted: Wanted, limit: int, include_replayed: bool
) -> Any:
    topic = await _dead_letter_topic_of(kafka, *named)
    async with DeadLetterLog(kafka, topic) as dead_letters, Producer(kafka, replay_producer_settings()) as producer:
        if not include_replayed:
            _report_missing_progress(dead_letters)
        return await dead_letters.replay(producer, wanted, limit=limit, include_replayed=include_replayed)


def _report_missing_progress(dead_letters: DeadLetterLog) -> None:
    if not dead_letters.has_progress:
        typer.echo(
            f"{dead_letters.topic}: no progress of earlier replays is stored, so all dead letters count as not "
            "replayed. Kafka deletes the progress offsets.retention.minutes after the last replay.",
            err=True,
        )


def _run_dlq_command(
    call: Callable[[KafkaSettings], Coroutine[Any, Any, Any]], servers: str | None, config: str | None
) -> Any:
    arguments = [
        *(["--config", config] if config else []),
        *(["--kafka.bootstrap-servers", servers] if servers else []),
    ]
    settings = DlqSettings.load(arguments, program="penstock dlq")
    log.configure(settings.log, "dlq")
    return asyncio.run(call(settings.kafka))


def _entry_as_json(entry: DeadLetterEntry) -> dict[str, Any]:
    own: dict[str, Any] = {
        "dead_letter": {
            "topic": entry.topic_partition.topic,
            "partition": entry.topic_partition.partition,
            "offset": entry.offset,
        },
        "written_ms": entry.written_ms,
        "replayed": entry.replayed,
    }
    if entry.dead_letter is None:
        return {**own, "fault": entry.fault}
    dead_letter = entry.dead_letter
    source = entry.dead_letter.record
    return {
        **own,
        "topic": source.topic,
        "partition": source.partition,
        "offset": source.offset,
        "timestamp": source.timestamp,
        "stage": dead_letter.stage,
        "exception": dead_letter.exception,
        "message": dead_letter.message,
        "attempts": dead_letter.attempts,
        "group": dead_letter.group,
        "key": _decode_bytes(source.key),
        "value": _decode_bytes(source.value),
        "headers": [[name, _decode_bytes(value)] for name, value in source.headers],
    }


def _decode_bytes(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")


def _print_table(entries: list[DeadLetterEntry]) -> None:
    table = Table("source", "written (UTC)", "stage", "exception", "message", "attempts", "group", "key", "replayed")
    for entry in entries:
        written = utc_text(entry.written_ms)
        dead_letter = entry.dead_letter
        if dead_letter is None:
            table.add_row(f"({entry.topic_partition}@{entry.offset})", written, "", "", _dead_letter_cell(entry.fault))
            continue
        source = dead_letter.record
        table.add_row(
            plain(coordinates_of(source)),
            written,
            _dead_letter_cell(dead_letter.stage),
            _dead_letter_cell(dead_letter.exception),
            _dead_letter_cell(dead_letter.message),
            str(dead_letter.attempts),
            _dead_letter_cell(dead_letter.group),
            _dead_letter_cell(_decode_bytes(source.key) or ""),
            "yes" if entry.replayed else "",
        )
    console_for(table).print(table)


def _dead_letter_cell(text: str) -> Text:
    """Return the text of a cell of the table of `penstock dlq`, shortened to TEXT_MAX characters."""
    shown = plain(text[: TEXT_MAX + 1])
    return shown if len(shown) <= TEXT_MAX else shown[: TEXT_MAX - 1] + Text("…")


def main(arguments: list[str]) -> int:
    """Run `penstock dlq`. Returns the exit status: 2 if the command line or a setting is invalid, 1 after any other
    error of Penstock (also for an invalid topic name), and if a replay could not send a dead letter."""
    return run_app(app, arguments, "penstock dlq")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
