"""Extracts the code blocks of the documents, so that tests can run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def blocks(document: Path, language: str = "python") -> list[str]:
    """The code blocks of a language, in the document's order."""
    parsed = Document.parse(str(document), CodeBlockParser(language, _nothing), encoding="utf-8")
    return [str(example.parsed) for example in parsed.examples()]


def block(document: Path, language: str, containing: str) -> str:
    """The only code block of a language that contains this text."""
    (found,) = [one for one in blocks(document, language) if containing in one]
    return found


def names_of(document: Path, *of: str) -> dict[str, Any]:
    """Run these Python blocks in order, by default all of the document's, and return the names that they define."""
    names: dict[str, Any] = {"__name__": "document"}
    for one in of or blocks(document):
        exec(compile(one, str(document), "exec"), names)
    return names


def _nothing(_: Example) -> None:
    """Evaluate nothing: Sybil only parses the blocks."""
