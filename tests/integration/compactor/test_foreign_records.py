"""Records in a changelog that no application of ours wrote: the compaction treats them as the restore does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.services.compactor.changelog import is_foreign
from penstock.services.compactor.compact import Compaction
from penstock.services.compactor.fold import Summary
from penstock.services.compactor.settings import CompactSettings
from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams import changelog_format as log
from tests.integration.test_stream_worker import chain_of, offline, running
from tests.integration.test_stream_worker_losses import FOREIGN, put, work

VALUES = [
    *(None, b"", b"\x01", b'{"id":1}', b"text", bytes(20), b"\x08L" + bytes(20), b"\x01l" + bytes(20), b"\xffL"),
    *(b"\x01L", b"\x02L", b"\x07Z" + bytes(20), b"\x01A", log.encode_deleted(0, 1, 1, 0)),
]


def test_spark_and_the_reader_agree_on_what_is_foreign(spark: Any) -> None:
    """The rule in Spark's expressions is the one that a restore goes by, and the places to skip are added to it."""
    rows = [(0, offset, value) for offset, value in enumerate(VALUES)]
    frame = spark.createDataFrame(
        [*rows, (1, 9, b"\x01L"), (1, 10, b"\x01L")], "partition int, offset long, value binary"
    )
    found = {(r.partition, r.offset) for r in frame.filter(is_foreign(frozenset({(1, 9)}))).collect()}
    assert found == {(0, offset) for offset, value in enumerate(VALUES) if log.is_foreign(value)} | {(1, 9)}


def test_a_compaction_over_foreign_and_corrupt_records(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    """Foreign records are counted and cost nothing; a corrupt one is refused by its place until it is named."""
    changelog = f"{topic_name}-changelog"

    def compact(**more: Any) -> Summary:
        broker = {"bootstrap_servers": kafka.bootstrap_servers}
        settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=broker, **more)
        return Compaction(spark, settings, print).run()

    async def live() -> None:
        async with chain_of(kafka, topic_name, 1) as chain:
            await chain.send(100)
            worker = chain.worker()
            async with running(worker):
                await chain.wait_processed(worker)
                await put(chain, changelog, *FOREIGN)
                await chain.send(100)
                await chain.wait_processed(worker)
            first = await asyncio.to_thread(compact)
            assert (first.foreign_records, first.finals > 0, first.live_rows > 0) == (len(FOREIGN), True, True)
            at = await put(chain, changelog, (b"k", b"\x02L of a layout to come"))
            await work(chain, 100, lake=str(tmp_path), skip_changelog_records=f"0:{at}")
            with pytest.raises(
                CorruptRecord, match=rf'{changelog}-0 at offset {at}: .*skip_changelog_records="0:{at}"'
            ):
                await asyncio.to_thread(compact)
            second = await asyncio.to_thread(compact, skip_changelog_records=f"0:{at}")
            assert (second.run, second.foreign_records) == (first.run + 1, 1)
            await work(chain, 100, lake=str(tmp_path))  # what the snapshot covers need not be named any more
            assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)

    asyncio.run(live())


def test_what_a_named_takeover_leaves_out_counts_nowhere(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    """The aggregator goes on before it at once: its next owner's commits confirm nothing of what the dead one wrote,
    nor does its state on disk have it.

    Each record is in one window of the lake, or is late, and the closed windows are those of an uninterrupted run.
    """
    disk = {"default_dsl_store": "rocksDB", "state_dir": str(tmp_path / "disk")}

    async def live() -> None:
        async with chain_of(kafka, topic_name, 1) as chain:
            await work(chain, 100, **disk)
            await work(chain, 100, **disk)
            read = await chain.read(f"{topic_name}-changelog")
            at = [r.offset for r in read if r.value and log.decode(r.value).operation == log.TAKEOVER][-1]
            async with Admin(chain.kafka) as admin:
                await admin.delete_group(topic_name)
            await work(chain, 37, skip_changelog_records=f"0:{at}", **disk)
            settings = CompactSettings(
                application=topic_name, lake=str(tmp_path), kafka=chain.kafka, skip_changelog_records=f"0:{at}"
            )
            await asyncio.to_thread(Compaction(spark, settings, print).run)
            closed = spark.read.format("delta").load(f"{settings.tables}/closed/s").collect()
            state = spark.read.format("delta").load(f"{settings.tables}/state").filter("row = 'window'").collect()
            late = set(await chain.values("late"))
            assert sum(r.n for r in closed) + sum(r.s.n_n for r in state) + len(late) == len(chain.sent)
            wanted, wanted_late = offline(topic_name, chain.sent)
            assert len(closed) == len({(r.key, r.start_ms, r.end_ms) for r in closed}) == len(wanted)
            assert (set(await chain.values("out")), late) == (set(wanted), set(wanted_late))

    asyncio.run(live())
