"""State on disk is used only if it is valid."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, CorruptEntry, ignore_changes
from penstock.shared.streams.changelog.format import (
    EPOCH_MAX,
    Takeover,
    encode_deleted,
    encode_takeover,
)
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.local_restore import (
    Overtaken,
    continue_from_local_state,
    require_local_state_in_force,
)
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

FOUND = Checkpoint("id", epoch=3, covered_offset=50, verified_offset=40, progress=None)


def topology(**more: Sum) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count(), **more).on_close().to("out")
    return builder.build()


def test_a_takeover_before_the_covered_offset_ends_the_trust() -> None:
    """A higher epoch that began before the state on disk was written makes it invalid. No other record does."""
    own, other = (encode_takeover(epoch, Takeover("app", "i", 0)) for epoch in (3, 4))
    for value in (own, encode_deleted(0, 4, 1, 1), b"foreign", None):
        require_local_state_in_force(FOUND, 44, value)
    with pytest.raises(Overtaken, match=r"epoch 4.*offset 44"):
        require_local_state_in_force(FOUND, 44, other)


def test_a_record_before_the_covered_offset_that_cannot_be_read_is_named() -> None:
    """A corrupt record before the covered offset is an error with its offset, because it may have been a takeover."""
    damaged = b"\x03" + encode_takeover(4, Takeover("app", "i", 0))[1:]
    with pytest.raises(CorruptEntry, match=r"offset 44.*version 3"):
        require_local_state_in_force(FOUND, 44, damaged)


def test_state_that_has_met_the_highest_epoch_is_not_gone_on_from(tmp_path: Path) -> None:
    """A local state with the highest epoch is not used."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    local, schemas = state.state_of(0), topology().schemas()
    local.begin(schemas)
    for highest, at in ((EPOCH_MAX - 1, 50), (EPOCH_MAX, None)):
        local.write(msgspec.structs.replace(FOUND, epoch=highest))
        assert continue_from_local_state(ChangelogReader(ignore_changes), local, schemas) == at
    local.close()


def test_a_restart_reads_the_tail_alone(tmp_path: Path) -> None:
    """Records that the state on disk covers are not read again. Incomplete state is not used."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(), commit_each=False, state=state)
    for i in range(20):
        driver.pipe("in", key=b"%d" % i, value=b"{}", timestamp=i % 3)
        driver.commit()
    driver.crash()
    driver.restore()
    assert (driver.restored_entries, len(driver.task.stores["s"]), driver.task.epoch) == (0, 20, 2)
    assert driver.task.local is not None
    driver.task.local.write(None)
    driver.crash()
    driver.restore()
    assert (driver.restored_entries, len(driver.task.stores["s"]), driver.task.epoch) == (
        len(driver.changelog) - 1,
        20,
        3,
    )
    driver.close()


def test_rows_of_other_aggregations_come_from_the_changelog(tmp_path: Path) -> None:
    """A store whose aggregations have changed is restored from the changelog and not from disk."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(), state=state)
    driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=5)
    driver.crash()
    driver.topology = topology(sum=Sum("id")).of_application("test-driver")
    driver.restore()
    assert driver.restored_entries > 0
    assert [(s.key, s.states[0]) for s in driver.task.stores["s"].rows()] == [("a", 1)]
    driver.pipe("in", key=b"a", value=b'{"id":4}', timestamp=6)
    driver.pipe("in", key=b"b", value=b'{"id":9}', timestamp=60)
    assert [record.value for record in driver.read("out")] == [b'{"key":"a","start":5,"end":6,"n":2,"sum":4.0}']
    driver.close()
