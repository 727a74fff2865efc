"""The offset topic: source offsets by partition, in any order of the partition's members. The file of a standalone
worker's offsets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.connect.storage.offset_store import FileOffsetStore, OffsetCache


def test_the_recorded_offsets() -> None:
    """Offsets are set, moved back and deleted."""
    cache, key = OffsetCache(), b'["src",{"filename":"in.txt"}]'
    cache.apply(key, b'{"position":17}')
    cache.apply(key, b'{"position":6}')
    assert cache.of_connector("src") == {key: b'{"position":6}'}
    cache.apply(key, None)
    assert (cache.of_connector("src"), cache.value(key)) == ({}, None)


def test_the_existing_key_is_kept() -> None:
    """A partition with its members in another order is the same and keeps its key."""
    cache = OffsetCache()
    cache.apply(b'["c",{"b":1,"a":2}]', b'{"x":1}')
    assert cache.key_for(b'["c",{"a":2,"b":1}]') == b'["c",{"b":1,"a":2}]'
    assert cache.key_for(b'["c",{"b":1,"a":3}]') == b'["c",{"a":3,"b":1}]'  # not in the topic yet
    assert cache.value(b'["c", {"a":2,"b":1}]') == b'{"x":1}'
    assert cache.raw() == {b'["c",{"b":1,"a":2}]': b'{"x":1}'}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"x", b"{}"),
        (b"[" * 100_000, b"{}"),
        (b'{"a":1}', b"{}"),
        (b'["c"]', b"{}"),
        (b'["c",3]', b"{}"),
        (b'["c",{}]', b"3"),
        (b'["c",{}]', b'{"a":' * 100_000),
        (None, None),
    ],
)
def test_malformed_offsets_are_errors(key: bytes | None, value: bytes | None) -> None:
    """A malformed key or value is a SerializationError."""
    with pytest.raises(SerializationError):
        OffsetCache().apply(key, value)


def test_null_forgets_like_a_tombstone() -> None:
    """A JSON null deletes an offset, as a tombstone does."""
    cache = OffsetCache()
    cache.apply(b'["c",{}]', b'{"x":1}')
    cache.apply(b'["c",{}]', b"null")
    assert cache.of_connector("c") == {}


async def test_tasks_that_store_offsets_at_once_lose_none(tmp_path: Path) -> None:
    """If many tasks store offsets in the file at the same time, each call succeeds and the file has all offsets."""
    file = tmp_path / "offsets"
    offsets = {b'["c",{"n":%d}]' % n: b'{"at":%d}' % n for n in range(16)}
    store = FileOffsetStore(file)
    await asyncio.gather(*(store.set({key: offset}) for key, offset in offsets.items()))
    restarted = FileOffsetStore(file)
    await restarted.start()
    assert restarted.cache.raw() == offsets


async def test_a_file_of_kafka_connect_is_named_in_the_error(tmp_path: Path) -> None:
    """The offset file of Kafka Connect's standalone worker, a Java object, cannot be read."""
    file = tmp_path / "offsets"
    file.write_bytes(bytes.fromhex("aced00057372"))
    with pytest.raises(ConfigError, match="Kafka Connect"):
        await FileOffsetStore(file).start()
