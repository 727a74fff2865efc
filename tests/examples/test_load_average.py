"""The example connector runs on a worker, and the guide contains its code."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from tests.shared.connect.harness import running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "load_average.py"
JSON = {"value_converter": "org.apache.kafka.connect.json.JsonConverter", "value_converter_schemas_enable": "false"}


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("load_average", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["load_average"] = module
    spec.loader.exec_module(module)
    return module


async def test_the_example_runs() -> None:
    """A restarted task continues counting at its last offset."""
    async with running() as run:
        connector = loaded().LoadConnector
        for wanted in (2, 5):
            id = await run.run(connector, topic="t", interval_ms="1", **JSON)
            await run.until(lambda wanted=wanted: len(run.cluster.records("t")) > wanted)  # type: ignore[misc]
            await run.worker.stop_tasks([id])
        counts = [json.loads(record.value or b"")["count"] for record in run.cluster.records("t")]
        assert counts == list(range(1, len(counts) + 1))


def test_the_guide_shows_it() -> None:
    """The guide contains the example's code, which has at most 30 lines."""
    code = EXAMPLE.read_text(encoding="utf-8").partition("\n\n")[2]
    assert code in (ROOT / "docs" / "connect.md").read_text(encoding="utf-8")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
