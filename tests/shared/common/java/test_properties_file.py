"""Java properties files, read as Java reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.java.properties_file import render_properties


def read_properties(text: str) -> dict[str, str]:
    """java.util.Properties.load for the output of `render_properties`, by the rules of its documentation."""
    named = {"n": "\n", "r": "\r", "t": "\t"}
    read: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        parts, units, i = [[], []], 0, 0  # type: ignore[var-annotated]
        while i < len(line):
            character = line[i]
            if character == "\\" and line[i + 1] == "u":
                parts[units].append(chr(int(line[i + 2 : i + 6], 16)))
                i += 6
            elif character == "\\":
                parts[units].append(named.get(line[i + 1], line[i + 1]))
                i += 2
            elif character == "=" and units == 0:
                units, i = 1, i + 1
            else:
                parts[units].append(character)
                i += 1
        name, value = ("".join(p).encode("utf-16", "surrogatepass").decode("utf-16") for p in parts)
        read[name] = value
    return read


texts = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.dictionaries(texts.filter(bool), texts))
def test_properties_round_trip(properties: dict[str, str]) -> None:
    """Any properties round-trip as one ASCII line each, as Java reads them."""
    text = render_properties(properties)
    assert text.isascii()
    assert text.count("\n") == len(properties)
    assert read_properties(text) == properties
