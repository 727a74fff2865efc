"""Compressed bodies, inflated step by step."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from penstock.api.http.content_encoding import STEP_BYTES, CorruptBody, Inflater, inflater_of, zstd
from penstock.api.http.problem import Problem

Compress = Callable[[bytes], bytes]
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS: dict[str, Compress] = {"gzip": gzip.compress, "zstd": lambda data: zstd.compress(data, options=CHECKED)}
ENCODINGS = list(COMPRESS)


def steps(encoding: str, *chunks: bytes) -> list[bytes]:
    """What each step of a whole body returned."""
    inflater, found = Inflater(encoding), []
    for chunk in chunks:
        inflater.feed(chunk)
        while inflater.pending:
            found.append(inflater.step())
    inflater.close()
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), cut=st.integers(1, 50))
def test_the_data_is_the_same_however_the_body_is_cut(encoding: str, parts: list[bytes], cut: int) -> None:
    """Several members or frames are one body; so is one that is empty."""
    body = b"".join(COMPRESS[encoding](part) for part in parts)
    found = steps(encoding, *(body[i : i + cut] for i in range(0, len(body), cut)))
    assert b"".join(found) == b"".join(parts)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("repeats", [1, 4])
def test_no_step_returns_more_than_the_limit(encoding: str, repeats: int) -> None:
    """A body of some kilobytes that holds 64 MB is given out 64 KiB at a time; nothing runs ahead."""
    body = COMPRESS[encoding](bytes(16 * 1_048_576)) * repeats
    assert len(body) < 100_000
    found = steps(encoding, body)
    assert max(map(len, found)) == STEP_BYTES
    assert sum(map(len, found)) == repeats * 16 * 1_048_576


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_data_that_cannot_be_compressed_is_whole(encoding: str) -> None:
    """Random bytes, which take several chunks of a body."""
    data = random.Random(7).randbytes(500_000)
    body = COMPRESS[encoding](data)
    assert b"".join(steps(encoding, *(body[i : i + 65_536] for i in range(0, len(body), 65_536)))) == data


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kept", [0, 1, 5, 12, -1])
def test_a_body_that_ends_too_early_is_corrupt(encoding: str, kept: int) -> None:
    """Also one with no byte at all: it is not even an empty member."""
    body = COMPRESS[encoding](b"some data that is long enough")
    with pytest.raises(CorruptBody, match=encoding):
        steps(encoding, body[:kept])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_that_is_something_else_is_corrupt(encoding: str) -> None:
    """Plain text, a flipped byte in the middle, and what follows the last member."""
    body = COMPRESS[encoding](random.Random(7).randbytes(1_000))
    flipped = bytes([*body[:500], body[500] ^ 1, *body[501:]])
    for wrong in (b'{"a":1}', flipped, body + b"more"):
        with pytest.raises(CorruptBody, match=encoding):
            steps(encoding, wrong)


def test_a_deflate_stream_is_not_gzip() -> None:
    """Only what the header names is taken."""
    with pytest.raises(CorruptBody):
        steps("gzip", zlib.compress(b"a"))


def test_a_frame_that_demands_too_much_memory_is_refused() -> None:
    """A zstd frame names its window, and with it the memory that it needs: 8 MiB at most."""
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    frame = zstd.compress(random.Random(7).randbytes(1_000) * 20_000, options=options)
    with pytest.raises(CorruptBody, match="memory"):
        steps("zstd", frame)


@pytest.mark.parametrize("named", [[], [""], ["identity"], ["Identity", ""]])
def test_a_plain_body_needs_nothing(named: list[str]) -> None:
    """Without an encoding, and with the one that is none."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is None


@pytest.mark.parametrize("named", [["gzip"], ["GZIP"], ["x-gzip"], ["zstd"], ["identity, gzip"]])
def test_one_encoding_that_is_known_is_taken(named: list[str]) -> None:
    """In any case of letters, and by its old name."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is not None


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["br"], "'br' is not supported"),
        (["gzip, zstd"], "several"),
        (["gzip", "gzip"], "several"),
        (["b" * 99], "bbb'"),
    ],
)
def test_another_encoding_is_a_415_that_names_those_there_are(named: list[str], said: str) -> None:
    """In words, and in the header that clients read; several encodings are refused as such."""
    with pytest.raises(Problem) as e:
        inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named]))
    response = e.value.response()
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")
    assert said in e.value.detail
    assert len(e.value.detail) < 200
