"""Finished offsets as commit metadata."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.parallel_consumer.commit_metadata import (
    METADATA_BYTES_MAX,
    Ranges,
    decode_finished,
    encode_finished,
    encoded_bytes_max,
)
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import OffsetAndMetadata


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, Ranges]:
    base = draw(st.integers(0, 2**62))
    steps = st.tuples(
        st.one_of(st.integers(1, 3), st.integers(1, 200_000)), st.one_of(st.integers(0, 3), st.integers(0, 200_000))
    )
    at, out = base, []
    for gap, length in draw(st.lists(steps, max_size=300)):
        out.append((at + gap, at + gap + length))
        at += gap + length + 1
    return base, tuple(out)


@given(ranges())
def test_what_is_encoded_is_decoded(given_ranges: tuple[int, Ranges]) -> None:
    """The text gives back exactly the ranges, in runs or as a bitmap."""
    base, finished = given_ranges
    assert decode_finished(OffsetAndMetadata(base, encode_finished(base, finished))) == finished


@given(ranges())
def test_the_bound_holds(given_ranges: tuple[int, Ranges]) -> None:
    """No encoding is longer than the bound that the scheduler plans with."""
    base, finished = given_ranges
    span = finished[-1][1] - base + 1 if finished else 0
    assert len(encode_finished(base, finished)) <= encoded_bytes_max(len(finished), span)


def test_alternating_offsets_become_a_bitmap() -> None:
    """Every second offset of 24,000 fits into a commit, which runs alone would not."""
    finished = [(offset, offset) for offset in range(1_001, 25_000, 2)]
    text = encode_finished(1_000, finished)
    assert text.startswith("p1b:")
    assert len(text) <= METADATA_BYTES_MAX
    assert decode_finished(OffsetAndMetadata(1_000, text)) == tuple(finished)


def test_a_long_run_is_short() -> None:
    """A million finished records behind one unfinished cost a few bytes."""
    assert len(encode_finished(5, [(6, 1_000_006)])) < 20


@pytest.mark.parametrize("text", ["", "my own note", "p2r:AAAA"])
def test_other_metadata_means_nothing_finished(text: str) -> None:
    """Metadata of another program or a later version is no error, and contains no finished offsets."""
    assert decode_finished(OffsetAndMetadata(7, text)) == ()


@pytest.mark.parametrize("text", ["p1r:", "p1r:!", "p1r:BwE=", "p1r:BwGA", "p1b:////////////////////"])
def test_damaged_metadata_is_refused(text: str) -> None:
    """Metadata of ours that is cut off or mangled is named, not guessed at."""
    with pytest.raises(DataError, match="offset 7"):
        decode_finished(OffsetAndMetadata(7, text))


def test_metadata_of_another_offset_is_refused() -> None:
    """An offset that was altered while its metadata stayed cannot mark the wrong records as finished."""
    with pytest.raises(DataError, match="belongs to offset 7"):
        decode_finished(OffsetAndMetadata(8, encode_finished(7, [(9, 9)])))


@given(st.binary(max_size=60), st.sampled_from(["p1r:", "p1b:"]))
def test_any_bytes_are_ranges_or_refused(data: bytes, prefix: str) -> None:
    """Arbitrary bytes give rising ranges or a DataError, never another exception."""
    import base64

    try:
        got = decode_finished(OffsetAndMetadata(0, prefix + base64.b64encode(b"\0" + data).decode()))
    except DataError:
        return
    edges = [edge for pair in got for edge in pair]
    assert edges == sorted(edges)
