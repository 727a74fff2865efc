"""Records in a changelog that no application of ours wrote: the compaction treats them as the restore does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.services.spark.compaction.compact import CompactionJob, CompactionReport
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import CorruptRecord
from tests.integration.test_stream_worker import chain_of, offline, running
from tests.integration.test_stream_worker_losses import FOREIGN, put, run_until_error
from tests.shared_broker import Broker


def test_a_compaction_over_foreign_and_corrupt_records(
    spark: Any, kafka: Broker, topic_name: str, tmp_path: Path
) -> None:
    """Foreign records are counted and skipped. A corrupt record stops every reader, and the error names its
    coordinates."""
    changelog = f"{topic_name}-changelog"

    def compact() -> CompactionReport:
        broker = {"bootstrap_servers": kafka.bootstrap_servers}
        settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=broker)
        return CompactionJob(spark, settings, print).run()

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
            assert (first.foreign_records, first.closed_rows > 0, first.live_rows > 0) == (len(FOREIGN), True, True)
            at = await put(chain, changelog, (b"k", b"\x02L of a layout to come"))
            with pytest.raises(CorruptRecord, match=rf"{changelog}-0.*offset {at}:"):
                await asyncio.to_thread(compact)
            with pytest.raises(CorruptRecord, match=rf"{changelog}-0.*offset {at}:"):
                await run_until_error(chain.worker(lake=str(tmp_path)))
            assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)

    asyncio.run(live())
