"""The connectors for tests: ascending numbers, reports of received records, and failures on request."""

from __future__ import annotations

import json

import pytest

from penstock.shared.connect.connectors.verifiable import (
    MockSinkConnector,
    MockSourceConnector,
    VerifiableSinkConnector,
    VerifiableSourceConnector,
)
from penstock.shared.connect.runtime.states import State, TargetState
from tests.shared.connect.harness import running


async def test_numbers_ascend_and_continue(capsys: pytest.CaptureFixture[str]) -> None:
    """The source sends each number once and continues after a restart, and the sink prints each one."""
    async with running() as run:
        settings = {"topic": "t", "throughput": "500", "quiet": "true", "value_converter_schemas_enable": "false"}
        for wanted in (3, 30):
            id = await run.run(VerifiableSourceConnector, **settings)
            await run.until(lambda wanted=wanted: len(run.cluster.records("t")) > wanted)  # type: ignore[misc]
            await run.worker.stop_tasks([id])
        numbers = [int(record.value or b"") for record in run.cluster.records("t")]
        assert numbers == list(range(len(numbers)))
        id = await run.run(VerifiableSinkConnector, topics="t")
        printed: list[str] = []

        def flushed() -> list[str]:
            printed.extend(line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
            return [line for line in printed if json.loads(line)["flushed"]]

        await run.until(lambda: len(flushed()) >= len(numbers))
        assert [int(json.loads(line)["seqno"]) for line in printed if not json.loads(line)["flushed"]] == numbers


@pytest.mark.parametrize("connector", [MockSinkConnector, MockSourceConnector])
async def test_mock_tasks_fail_after_their_delay(connector: type) -> None:
    """A mock task fails after its delay."""
    async with running() as run:
        id = await run.run(connector, topics="t", mock__mode="task-failure", delay__ms="10")
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "mock_mode=task-failure" in run.listener.traces[0]


async def test_a_mock_connector_fails_itself() -> None:
    """A mock connector fails from its own background task, through its context."""
    async with running() as run:
        config = {"connector.class": "MockSource", "name": "m", "mock_mode": "connector-failure", "delay_ms": "5"}
        assert await run.worker.start_connector("m", config, TargetState.STARTED, run.listener) is State.RUNNING
        await run.until(lambda: run.worker.state("m") is State.FAILED)
        assert run.listener.of("m") == ["startup", "failure"]
