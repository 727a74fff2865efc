"""Whether a task is at work."""

from __future__ import annotations

import threading

import pytest

from shared.streams.at_work import at_work, is_at_work


@at_work("process")
class Task:
    """Something whose `process` is work."""

    def process(self, other: Task | None = None, *, fails: bool = False) -> tuple[bool, bool]:
        """Whether this task, and the other, is at work."""
        if fails:
            raise ValueError("spoilt")
        seen = other.process()[0] if other is not None else False
        return is_at_work(self), seen

    def elsewhere(self) -> list[bool]:
        """Whether it is at work in another thread."""
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_at_work(self)))
        thread.start()
        thread.join()
        return seen


def test_only_the_task_whose_method_runs() -> None:
    """A task is at work while its method runs, also after another's ran within, and no longer when it is done."""
    one, other = Task(), Task()
    assert one.process(other) == (True, True)
    assert not is_at_work(one)
    assert not is_at_work(other)


def test_an_error_ends_the_work() -> None:
    """A method that raises leaves no task at work."""
    task = Task()
    with pytest.raises(ValueError, match="spoilt"):
        task.process(fails=True)
    assert not is_at_work(task)


def test_another_thread() -> None:
    """Another thread is never at a task's work."""
    made = at_work("elsewhere")(type("Threaded", (Task,), {"elsewhere": Task.elsewhere}))
    assert made().elsewhere() == [False]
