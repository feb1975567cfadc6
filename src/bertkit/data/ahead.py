"""Batches made ahead of the step that wants them, by a thread of this process.

Nothing here follows a paper. A batch is a function of its step's number, so the order in which a thread makes them
changes nothing. Sibling stream.py has worker processes besides, for corruptions that cost more than a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")

BATCHES_AHEAD = 4
"""Steps whose batches are prepared before they are wanted; of each worker, where there are several."""


def ahead(make: Callable[[int], Made], steps: range) -> Generator[Made, None, None]:
    """What `make` gives for these steps, in order; an error of its is raised where its step is asked for.

    Whoever stops before the end closes the iterator, which waits for what is being made.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        waiting: deque[Future[Made]] = deque()
        try:
            for step in steps:
                waiting.append(thread.submit(make, step))
                if len(waiting) > BATCHES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
