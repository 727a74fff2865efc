"""Writes Java properties files: the embedded broker's `server.properties`, and the configuration of Spark's JVM."""

from __future__ import annotations

from collections.abc import Mapping


def render_properties(properties: Mapping[str, str]) -> str:
    """Return the text of a Java properties file, ASCII only.

    >>> render_properties({"a b": "1:2"}), render_properties({"name": "ä\\n"})
    ('a\\\\ b=1\\\\:2\\n', 'name=\\\\u00e4\\\\n\\n')
    """
    return "".join(
        f"{_escape_java_property(name)}={_escape_java_property(value)}\n" for name, value in properties.items()
    )


def _escape_java_property(text: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    units = text.encode("utf-16-be", "surrogatepass")
    out = []
    for high, low in zip(units[::2], units[1::2], strict=True):
        character = chr(high << 8 | low)
        if character in named:
            out.append(named[character])
        elif character in " :=#!\\":
            out.append(f"\\{character}")
        else:
            out.append(character if 32 < ord(character) < 127 else f"\\u{ord(character):04x}")
    return "".join(out)
