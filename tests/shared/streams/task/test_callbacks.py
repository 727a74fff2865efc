"""A task is inside a callback only while its own method runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from penstock.shared.common.errors import IllegalState
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.callbacks import in_callback, is_in_callback
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


@in_callback("process")
class Task:
    """Something whose `process` is work."""

    def process(self, other: Task | None = None, *, fails: bool = False) -> tuple[bool, bool]:
        """Whether this task, and the other, is at work."""
        if fails:
            raise ValueError("half_processed")
        seen = other.process()[0] if other is not None else False
        return is_in_callback(self), seen

    def elsewhere(self) -> list[bool]:
        """Whether it is at work in another thread."""
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_in_callback(self)))
        thread.start()
        thread.join()
        return seen


def test_only_the_task_whose_method_runs() -> None:
    """A task is at work while its method runs, also after another's ran within, and no longer when it is done."""
    one, other = Task(), Task()
    assert one.process(other) == (True, True)
    assert not is_in_callback(one)
    assert not is_in_callback(other)


def test_an_error_ends_the_work() -> None:
    """A method that raises leaves no task at work."""
    task = Task()
    with pytest.raises(ValueError, match="half_processed"):
        task.process(fails=True)
    assert not is_in_callback(task)


def test_another_thread() -> None:
    """A call from another thread is not inside a callback of the task."""
    made = in_callback("elsewhere")(type("Threaded", (Task,), {"elsewhere": Task.elsewhere}))
    assert made().elsewhere() == [False]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["create_task", "call_soon"])
async def test_an_asyncio_task_of_process_is_outside_of_callbacks(how: str) -> None:
    """An asyncio task or a callback made in process() runs after it: its context forwards and schedules nothing."""
    messages: list[str] = []

    class Later(Processor):
        def process(self, record: Record) -> None:
            loop = asyncio.get_running_loop()
            if how == "create_task":
                self.later = loop.create_task(self.forward_later(record))
            else:
                loop.call_soon(self.forward_now, record)

        async def forward_later(self, record: Record) -> None:
            self.forward_now(record)

        def forward_now(self, record: Record) -> None:
            calls: list[Callable[[], object]] = [
                lambda: self.context.forward(record),
                lambda: self.context.schedule(5, PunctuationType.STREAM_TIME, print),
            ]
            for call in calls:
                with pytest.raises(IllegalState, match="asyncio task") as raised:
                    call()
                messages.append(str(raised.value).split("(")[0])

    builder = StreamsBuilder()
    builder.stream("in").process(Later, name="late").to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    for _ in range(3):
        await asyncio.sleep(0)
    assert messages == ["'late': forward", "'late': schedule"]
    assert driver.read("out") == []
