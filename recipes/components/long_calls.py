# SPDX-License-Identifier: Apache-2.0
"""Work of one rank or of each, for which all ranks wait, however long it takes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar, cast

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")
SECONDS_BETWEEN_WORDS = 5  # Far less than any --ddp_timeout


def call_on_rank_0(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Return on every rank what a function returns on rank 0. Every rank takes part.

    A collective call ends the run if rank 0 comes to it later than --ddp_timeout, but a transfer
    of files may take hours. So a thread of rank 0 calls the function, and the others hear every few
    seconds that it is not done. A rank that is lost meanwhile is noticed as always.

    Args:
        function: what rank 0 calls; it must not communicate with other ranks.
    """
    work = None
    if accelerator.is_main_process:
        thread = ThreadPoolExecutor(1, "long call")
        work = thread.submit(function)
        thread.shutdown(wait=False)  # It ends with the function.
    is_done = False
    result = None
    while not is_done:
        word = None if work is None else word_of(work)
        is_done, result = broadcast_object_list([word])[0]
    return cast(T, result)


def call_on_every_rank(accelerator: Accelerator, function: Callable[[], T]) -> list[T]:
    """Return on every rank what a function returns on each, by rank. Every rank takes part.

    It may take as long as it does in `call_on_rank_0`.

    Args:
        function: what each rank calls; it must not communicate with other ranks. If it raises on
            one of them, that rank raises, and the launcher ends the others.
    """
    thread = ThreadPoolExecutor(1, "long call")
    work = thread.submit(function)
    thread.shutdown(wait=False)
    return wait_for_every_rank(work)


def wait_for_every_rank(
    work: Future[T], between_words: Callable[[], None] | None = None
) -> list[T]:
    """Return on every rank what the thread of each returns, by rank. Every rank takes part.

    Args:
        work: of this rank's thread; if it raises, that is as in `call_on_every_rank`.
        between_words: is called every few seconds while all ranks answer.
    """
    words: list[tuple[bool, T | None]] = [(False, None)]
    while not all(is_done for is_done, _ in words):
        words = gather_object([word_of(work)])
        if between_words is not None:
            between_words()
    return [cast(T, result) for _, result in words]


def word_of(work: Future[T]) -> tuple[bool, T | None]:
    """Return whether a thread is done, now or within some seconds, and its result if so.

    Raises what its function raised.
    """
    wait([work], SECONDS_BETWEEN_WORDS)
    if not work.done():
        return False, None
    return True, work.result()
