"""The records that are not yet in Kafka, and the source offsets that may be stored.

An offset may be stored if every record of its source partition up to it is in Kafka, or was dropped.

>>> submitted = SubmittedRecords()
>>> first = submitted.submit({"file": "a"}, {"position": 1})
>>> second = submitted.submit({"file": "a"}, {"position": 2})
>>> second.ack()
>>> submitted.committable()  # the first is not in Kafka yet
{}
>>> first.ack()
>>> committable = submitted.committable()
>>> [(dict(o.partition), o.offset) for o in committable.values()], submitted.pending
([({'file': 'a'}, {'position': 2})], 0)
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition


class PartitionOffset(NamedTuple):
    """A source partition with the offset that may be stored for it."""

    partition: Partition
    offset: Offset


class SubmittedRecord:
    """One pending record."""

    __slots__ = ("_owner", "_settled", "acked", "key", "offset", "partition")

    def __init__(self, owner: SubmittedRecords, key: bytes, partition: Partition, offset: Offset) -> None:
        self._owner = owner
        self.key = key
        self.partition = partition
        self.offset = offset
        self.acked = False
        self._settled = False

    def __repr__(self) -> str:
        return f"<SubmittedRecord {self.offset} {'acked' if self.acked else 'pending'}>"

    def ack(self) -> None:
        """Report that the record is no longer pending: it is in Kafka, or is skipped."""
        if not self._settled:
            self._settled = True
            self.acked = True
            self._owner.pending -= 1

    def drop(self) -> None:
        """Remove a record that was never sent, unless it was removed or acknowledged before."""
        if not self._settled:
            self._settled = True
            self._owner.pending -= 1
            self._owner.forget(self)


class SubmittedRecords:
    """The pending records, in order, for each source partition."""

    def __init__(self) -> None:
        self.queues: dict[bytes, deque[SubmittedRecord]] = {}
        self.pending = 0

    def __repr__(self) -> str:
        return f"<SubmittedRecords {self.pending} pending of {len(self.queues)} partitions>"

    def submit(self, partition: Partition, offset: Offset) -> SubmittedRecord:
        """Add a record that is about to be sent. Raises ConnectError if its partition has no JSON form."""
        key = source_partition_key(partition)
        record = SubmittedRecord(self, key, partition, offset)
        queue = self.queues.get(key)
        if queue is None:
            queue = deque()
            self.queues[key] = queue
        queue.append(record)
        self.pending += 1
        return record

    def committable(self) -> dict[bytes, PartitionOffset]:
        """Remove the acknowledged records before the first pending one of each source partition.

        Returns the offset of the last removed record of each partition that had such records, by
        `source_partition_key`.
        """
        result = {}
        for key, queue in list(self.queues.items()):
            last = None
            # Only the acknowledged records at the head count. An offset behind a pending record would lose that record
            # if the task restarts before Kafka has it.
            while queue and queue[0].acked:
                last = queue.popleft()
            if last is not None:
                result[key] = PartitionOffset(last.partition, last.offset)
            if not queue:
                del self.queues[key]
        return result

    def forget(self, record: SubmittedRecord) -> None:
        """Remove a record, usually the last one, from its queue. Only the record calls this."""
        queue = self.queues[record.key]
        if queue[-1] is record:
            queue.pop()
        else:
            queue.remove(record)
        if not queue:
            del self.queues[record.key]


def source_partition_key(partition: Partition) -> bytes:
    """Return the key of a source partition: its JSON, with the names in order, also in nested maps.

    Raises ConnectError if the partition has no JSON form.

    >>> source_partition_key({"table": {"b": 1, "a": 2}, 7: "x"})
    b'{"7":"x","table":{"a":2,"b":1}}'
    """
    try:
        # Names such as 7 become text first, since the encoder sorts text only.
        return msgspec.json.encode(msgspec.to_builtins(dict(partition), str_keys=True), order="deterministic")
    # No DataError, which `errors.tolerance=all` would tolerate although no offset of the partition can be stored.
    except (TypeError, ValueError, RecursionError) as e:
        raise ConnectError(f"source partition {partition!r} has no JSON form: {e}") from None
