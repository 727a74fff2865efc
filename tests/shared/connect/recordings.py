"""Recordings of a real Kafka Connect: requests to its REST interface, its topics and its dead letters."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"


def recorded_requests() -> list[dict[str, Any]]:
    return _lines("kafka_connect_rest.jsonl.gz")


def recorded_dead_letters() -> list[dict[str, Any]]:
    return _lines("kafka_connect_dead_letters.jsonl.gz")


def recorded_records(topic: str) -> list[dict[str, Any]]:
    """The records of one of the worker's own topics, in the order of their offsets."""
    return [row for row in _lines("kafka_connect_topics.jsonl.gz") if row["topic"] == topic]


def _lines(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
