"""Record locations: the batch and index of each record of a bulk."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.delivery import DeliveryLocations
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.common.errors import BufferExhausted, RecordTooLarge
from penstock.shared.common.records import TopicPartition
from tests.shared.clients.protocol.compressions import COMPRESSION

BATCHES = 3
steps = st.one_of(
    st.lists(st.integers(0, BATCHES - 1), max_size=8),  # a run into these batches
    st.integers(0, BATCHES - 1),  # one record by itself
    st.just("refused"),
    st.tuples(st.lists(st.integers(-1, BATCHES - 1), min_size=1, max_size=8)),  # a slice of columns; -1: not taken
    st.just("other"),  # somebody else appends between two runs
)


def batch_of(number: int) -> ProducerBatch:
    return ProducerBatch(TopicPartition("t", number), 16_384, COMPRESSION["none"], False, 0)


def fill(
    delivery_locations: DeliveryLocations, batches: list[ProducerBatch], numbers: list[int]
) -> list[tuple[ProducerBatch, int]]:
    """Appends a run as a bulk does, and returns each record's batch and index."""
    run, seen = delivery_locations.begin(), []
    for number in numbers:
        batch = batches[number]
        seen.append((batch, batch.count))
        if batch.run is not run:
            batch.run, run[batch] = run, batch.count
        batch.count += 1
        delivery_locations.of.append(batch)
    delivery_locations.end()
    return seen


def fill_slice(
    delivery_locations: DeliveryLocations, batches: list[ProducerBatch], numbers: list[int]
) -> list[tuple[object, int]]:
    """Adds a slice of columns by batch, with the rejected records at the end."""
    error, seen, spans = BufferExhausted("full"), [(None, -1)] * len(numbers), []
    for number in [*range(BATCHES), -1]:
        rows = np.flatnonzero(np.array(numbers) == number)
        location = error if number < 0 else batches[number]
        first = -1 if number < 0 else batches[number].count
        if len(rows):
            spans.append((location, first, rows))
        for i, row in enumerate(rows.tolist()):
            seen[row] = (location, -1 if number < 0 else first + i)
        if number >= 0:
            batches[number].count += len(rows)
    delivery_locations.add_slice(len(numbers), spans)
    return seen


@given(st.lists(steps, min_size=1, max_size=12))
def test_indices_are_those_of_the_appends(taken: list[list[int] | tuple[list[int]] | int | str]) -> None:
    """Through runs, slices, single records, rejections and other senders, each record has the index of its append."""
    delivery_locations, batches = DeliveryLocations(), [batch_of(number) for number in range(BATCHES)]
    seen: list[tuple[object, int]] = []
    for step in taken:
        if isinstance(step, list):
            seen += fill(delivery_locations, batches, step)
        elif isinstance(step, tuple):
            seen += fill_slice(delivery_locations, batches, step[0])
        elif isinstance(step, int):
            seen.append((batches[step], batches[step].count))
            delivery_locations.add(batches[step], batches[step].count)
            batches[step].count += 1
        elif step == "refused":
            error = RecordTooLarge("t")
            seen.append((error, -1))
            delivery_locations.add(error, -1)
        else:
            batches[0].count += 1
    found = delivery_locations.batches()
    assert set(found) == {location for location, _ in seen if isinstance(location, ProducerBatch)}
    assert len(set(found)) == len(found)
    assert len(delivery_locations) == len(seen)
    if seen:
        assert delivery_locations.last() == seen[-1]
    assert list(zip(delivery_locations.of, delivery_locations.indices(), strict=True)) == seen
    assert delivery_locations.batches() == found
    assert not seen or delivery_locations.last() == seen[-1]
    assert all(batch.run is None for batch in batches)


def test_an_empty_run_leaves_nothing() -> None:
    """An empty run is dropped. Batches are listed once, in the order of their first record."""
    delivery_locations, one, two = DeliveryLocations(), batch_of(1), batch_of(2)
    delivery_locations.begin()
    delivery_locations.end()
    assert repr(delivery_locations) == "<DeliveryLocations of 0 records in 0 runs>"
    for batch, index in ((two, 0), (one, 0), (two, 1)):
        delivery_locations.add(batch, index)
    assert delivery_locations.batches() == [two, one]
