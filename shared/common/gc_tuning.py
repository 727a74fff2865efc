"""Sets up the process's garbage collector for a service: fewer cycle searches, and none among long-lived objects.

Records are freed by reference counting, without the collector. With Python's default threshold (700 new objects, from
3.13 on 2,000) the collector would search the same buffered records again and again. A search of all objects of a
service blocks the event loop for about 100 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS_MAX = 20_000
"""New objects after which the collector searches the young generation for cycles."""
OLDER_EVERY = 50
"""Searches of a generation after which the next older generation is searched too."""


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the collector off during imports. It would take a tenth of their time or more.

    Later cycle searches ignore what was imported, since none of it becomes garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def spare_the_collector() -> None:
    """Exclude all present objects from later cycle searches, and raise the thresholds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, OLDER_EVERY, OLDER_EVERY)
