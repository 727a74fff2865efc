"""The changelogs of the bench: the windows that are live according to their entries."""

from __future__ import annotations

from bench._changelogs import NUMBERS, ChangelogWriter, Entry
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog import format as log


class Written(ChangelogWriter):
    """Keeps the entries that would go to a topic."""

    def __init__(self, partitions: int = 1) -> None:
        super().__init__(KafkaSettings(), "app", NUMBERS, partitions)
        self.entries: list[Entry] = []

    async def _write(self, entries: object) -> int:
        self.entries = list(entries)  # type: ignore[call-overload]
        return len(self.entries)

    def live_after(self, live: set[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
        """Return the windows that are live after these entries. Unless `live` is empty, each closed window must have
        been live."""
        left = set(live)
        for key, value in self.entries:
            entry = log.decode_entry(value)
            assert key is not None
            at = (key, log.START.unpack_from(entry.body)[0])
            if entry.operation == log.LIVE:
                left.add(at)
            elif live:
                left.remove(at)
        return left


async def test_a_change_closes_changes_and_opens_as_many() -> None:
    """A change closes the oldest windows, writes as many others again, and opens as many new ones."""
    writer = Written()
    assert await writer.fill(100, 30) == 130
    before = writer.live_after(set())
    assert await writer.change(7) == 21
    after = writer.live_after(before)
    assert (len(before), len(after), len(before - after), len(after - before)) == (100, 100, 7, 7)
    written = {key for key, value in writer.entries if log.decode_entry(value).operation == log.LIVE}
    assert len(written & {key for key, _ in before}) == 7
    assert {int(key.rpartition(b"-")[2]) for key, _ in after} == set(writer.live)


async def test_a_window_stays_in_its_partition() -> None:
    """All entries of a key go to one partition. Each partition has a share of the entries, in the order of writing."""
    writer = Written(8)
    await writer.fill(1_000, 0)
    filled = writer.spread(writer.entries)
    assert [len(own) for own in filled] == writer.live_by_partition()
    assert min(map(len, filled)) > 1_000 / 8 / 2
    at = {key: partition for partition, own in enumerate(filled) for key, _ in own}
    await writer.change(100)
    changed = writer.spread(writer.entries)
    assert all(at.get(key, partition) == partition for partition, own in enumerate(changed) for key, _ in own if key)
    assert sorted(entry for own in changed for entry in own) == sorted(writer.entries)
    assert sum(writer.live_by_partition()) == 1_000
