"""The blocks of code in the product's documents, for the tests that hold a document to what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def blocks(document: Path, language: str = "python") -> list[str]:
    """The blocks of that language, in the document's order."""
    parsed = Sybil(parsers=[CodeBlockParser(language, _nothing)]).parse(document)
    return [str(example.parsed) for example in parsed.examples()]


def block(document: Path, language: str, containing: str) -> str:
    """The only block of that language that contains this text."""
    (found,) = [one for one in blocks(document, language) if containing in one]
    return found


def names_of(document: Path, *of: str) -> dict[str, Any]:
    """What these blocks of Python define, run one after the other; by default all of the document's."""
    names: dict[str, Any] = {"__name__": "document"}
    for one in of or blocks(document):
        exec(compile(one, str(document), "exec"), names)
    return names


def _nothing(_: Example) -> None:
    """Blocks are looked at, not evaluated by Sybil."""
