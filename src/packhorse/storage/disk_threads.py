"""Threads that move bytes beside the caller's, for files that want several transfers at once.

In: jobs. Out: futures that are done when a job has ended, however it ended. The threads are
daemons: a drive that never answers must not keep a process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final

from packhorse.errors import StorageError

_NAME: Final = "packhorse-disk"
_Job = tuple[Callable[[], None], "Future[None]"]


class DiskThreads:
    """A fixed number of threads, started with the first job."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job.

        Raises:
            ValueError: the threads have been told to end.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the threads of the disk have ended")
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._work, name=f"{_NAME}-{at}", daemon=True)
                    for at in range(self._num_threads)
                ]
                for thread in self._threads:
                    thread.start()
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """End the threads once all jobs are done; blocks until then. Twice is harmless."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                job()
                done.set_result(None)
            except (StorageError, OSError, ValueError) as error:
                done.set_exception(error)
            finally:
                if not done.done():
                    # Whatever ended this thread is shown where it ended; nobody waits for ever.
                    done.set_exception(StorageError("a thread that moves bytes has ended"))
