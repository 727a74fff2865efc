"""Keys as numbers: a key keeps its number while it exists, and space is used again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.windows.key_index import SLOTS_MIN, KeyIndex

names = st.binary(max_size=20) | st.sampled_from([b"a", b"b", b"", b"a\0"])


@given(st.lists(st.tuples(st.lists(names | st.none(), max_size=30), st.sets(names)), max_size=8))
def test_numbers_are_kept_until_their_keys_go(rounds: list[tuple[list[bytes | None], set[bytes]]]) -> None:
    """A key keeps its number while it exists, no other key has that number, and its bytes are returned unchanged."""
    index, known = KeyIndex(), dict[bytes, int]()
    for keys, gone in rounds:
        codes = index.codes_of(keys).tolist()
        for key, code in zip(keys, codes, strict=True):
            assert code == -1 if key is None else known.setdefault(key, code) == code
        assert len(set(known.values())) == len(known) == len(index)
        assert index.keys(np.array(list(known.values()), np.int32)) == list(known)
        is_used = np.zeros(index.capacity, np.bool_)
        is_used[[code for key, code in known.items() if key not in gone]] = True
        index.release(np.array([known[key] for key in gone if key in known], np.int64), is_used)
        known = {key: code for key, code in known.items() if key not in gone}
        assert [index.code(key) for key in gone] == [-1] * len(gone)
        assert [index.code(key) for key in known] == list(known.values())


def test_room_is_used_again() -> None:
    """The size of the index depends on the keys in use, not on all keys seen."""
    index = KeyIndex()
    for number in range(200):
        keys: list[bytes | None] = [b"key-%d-%d" % (number, i) for i in range(SLOTS_MIN)]
        codes = index.codes_of(keys)
        index.release(codes, np.zeros(index.capacity, np.bool_))
    assert len(index) == 0
    assert index.capacity < 2 * SLOTS_MIN
    assert len(index.arena) < 50_000
