# SPDX-License-Identifier: Apache-2.0
"""The ranks meet before their process group is made, so that one that never comes is named.

A rank may end or hang before it reaches the process group: its host has another command, lacks a
file, or its disk does not answer. On its own host the launcher notices an end. The other hosts
would wait for half an hour (`--ddp_timeout`), and not know for whom. The ranks therefore first sign
a list in the store at MASTER_ADDR:MASTER_PORT, and a rank that ends leaves word there.

The store may be older than this attempt of the run. What an earlier attempt has signed can only let
ranks wait in the process group instead. Word of an earlier attempt is not read, since the launcher
counts attempts.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any, NoReturn

from components.launcher import end_blocked_launcher
from components.status import (
    HOST,
    LOCAL_RANK,
    RANK,
    SECONDS_FOR_FIRST_RANK,
    Ending,
    process_status,
    report_to_launcher,
)
from core.exits import Exit

SECONDS_TO_COME = 600  # As long as torch's agents wait for each other
SECONDS_UNTIL_WARNING = 60
SECONDS_BETWEEN_LOOKS = 0.1
LOOKS_PER_SECOND = 1000  # by all ranks together: many ranks must not flood the store
SECONDS_TO_READ = 2  # A rank that leaves word keeps the store open for so long.
SECONDS_TO_LEAVE_WORD = 5
# A store that has not answered for so long is out of reach. A call to it has no time limit: if the
# network drops packets, the kernel gives the connection up after about 15 minutes.
SECONDS_TO_ANSWER = 30
LIST = "recipes"
ALL = "all are here"


class Meeting:
    """The list of the ranks that have come to a place of the start.

    Every rank signs at each place, and waits until all have. With one process nothing is done. Keep
    it until the process group is made: rank 0 may have the store.

    Attributes:
        rank: the rank that waits.
        num_hosts: the hosts of the run, as this host's launcher knows them.
    """

    def __init__(self, ddp_timeout: int) -> None:
        """Reach the store, where there are several ranks.

        Args:
            ddp_timeout: seconds that ranks wait for each other, here at most SECONDS_TO_COME.
        """
        self.rank = RANK
        self.num_hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
        self._num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._seconds = min(ddp_timeout, SECONDS_TO_COME)
        self._pause = max(SECONDS_BETWEEN_LOOKS, self._num_ranks / LOOKS_PER_SECOND)
        self._deadline = time.monotonic() + self._seconds + SECONDS_TO_ANSWER
        self._store: Any = None
        if self._num_ranks == 1 or not os.environ.get("MASTER_PORT"):
            return
        from torch.distributed import DistError

        try:
            is_here = RANK == 0 and not launchers_have_store()
            with self._ending_after_deadline():
                self._store = open_store(name_of_list(), self._seconds, is_here)
        except DistError as error:
            self._end(self._ending_without_store(str(error).splitlines()[0]))

    def wait_for_all(self, place: str) -> None:
        """Wait until all ranks are at a place of the start, such as "start".

        Ends as another rank that left word; with 1 if a rank does not come in time or the store
        does not answer, and with 64 if the hosts were started for runs of different sizes.
        """
        if self._store is None:
            return
        from torch.distributed import DistError

        self._note_answer()
        try:
            with self._ending_after_deadline():
                self._wait(place)
        except DistError as error:  # The launcher, or the rank, that has the store is gone.
            self._end(self._ending_without_store(str(error).splitlines()[0]))

    def _wait(self, place: str) -> None:
        mine = {"host": HOST, "hosts": self.num_hosts}
        self._store.set(f"{place}/{self.rank}", json.dumps(mine))
        ranks = list(range(self._num_ranks))
        missing: list[int] = []
        start = time.monotonic()
        has_warned = False
        while not self._store.check([f"{place}/{ALL}"]):
            if self._store.check([key_of_word()]):
                self._end(Ending.of_json(self._store.get(key_of_word())))
            self._note_answer()
            waited = time.monotonic() - start
            is_late = waited > self._seconds
            is_time_to_warn = waited > SECONDS_UNTIL_WARNING and not has_warned
            if is_late or is_time_to_warn:
                missing = self._missing(place, ranks)
            if self.rank == 0 and self._have_come(place, ranks):
                self._compare(place)
                self._store.set(f"{place}/{ALL}", "")
            elif is_late and missing:
                self._leave(self._ending_without(missing))
            elif is_time_to_warn and missing:
                has_warned = True
                self._warn(missing)
            elif waited > self._seconds + SECONDS_TO_ANSWER:
                self._leave(self._ending_without_rank_0())
            # The others wait for rank 0.
            time.sleep(SECONDS_BETWEEN_LOOKS if self.rank == 0 else self._pause)

    def _have_come(self, place: str, ranks: list[int]) -> bool:
        """Return whether ranks have signed at a place, by one request for all of them."""
        return self._store.check([f"{place}/{rank}" for rank in ranks])

    def _missing(self, place: str, ranks: list[int]) -> list[int]:
        """Return which ranks have not signed, by a few requests if those are few."""
        if self._have_come(place, ranks):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return self._missing(place, ranks[:middle]) + self._missing(place, ranks[middle:])

    def _compare(self, place: str) -> None:
        """End all ranks if their launchers know of different numbers of hosts."""
        keys = [f"{place}/{rank}" for rank in range(self._num_ranks)]
        signed = [json.loads(text) for text in self._store.multi_get(keys)]
        first = signed[0]
        for other in signed:
            if other["hosts"] != first["hosts"]:
                why = (
                    f"{first['host']} was started for a run on {first['hosts']} hosts, and "
                    f"{other['host']} for one on {other['hosts']}: give all launchers the same "
                    "--num_machines (torchrun: --nnodes)"
                )
                self._leave(Ending.failed(Exit.USAGE, why))

    def _warn(self, missing: list[int]) -> None:
        """Print once on each host for whom it waits."""
        if LOCAL_RANK == 0:
            text = f"{HOST} waits for {words_of(missing)}, for {self._seconds} s at most"
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _ending_without(self, missing: list[int]) -> Ending:
        why = (
            f"{words_of(missing)} of {self._num_ranks} did not come within {self._seconds} s of "
            f"rank {self.rank} on {HOST}: look into the logs of the other hosts"
        )
        return Ending.failed(Exit.FAILED, why)

    def _ending_without_rank_0(self) -> Ending:
        why = (
            f"rank 0 does not answer: all {self._num_ranks} ranks have come, and it did not say so "
            f"within {self._seconds + SECONDS_TO_ANSWER} s of rank {self.rank} on {HOST}: look "
            "into the logs of its host"
        )
        return Ending.failed(Exit.FAILED, why)

    def _ending_without_store(self, reason: str) -> Ending:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = f"{HOST} cannot reach the other ranks at {address}, which rank 0's host has: {reason}"
        return Ending.failed(Exit.FAILED, why)

    def _note_answer(self) -> None:
        """Wait for the next answer of the store from now on."""
        self._deadline = time.monotonic() + SECONDS_TO_ANSWER

    @contextlib.contextmanager
    def _ending_after_deadline(self) -> Generator[None]:
        """End this rank if the deadline passes in this context, since a call may never return."""
        is_over = threading.Event()
        threading.Thread(target=self._look_at_deadline, args=(is_over,), daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _look_at_deadline(self, is_over: threading.Event) -> None:
        while not is_over.wait(SECONDS_BETWEEN_LOOKS):
            if time.monotonic() > self._deadline:
                end_blocked_launcher()
                self._end(self._ending_without_store(f"no answer for {SECONDS_TO_ANSWER} s"))

    def _leave(self, ending: Ending) -> NoReturn:
        """Leave word for the other ranks, and end as the first rank that left word."""
        written = self._store.compare_set(key_of_word(), "", ending.to_json())
        time.sleep(SECONDS_TO_READ + self._pause)
        self._end(Ending.of_json(written))

    def _end(self, ending: Ending) -> NoReturn:
        """End this rank; the first rank of each host prints why.

        The launcher ends the others when that one has ended. They print it where it never comes.
        """
        self._deadline = math.inf
        if LOCAL_RANK > 0:
            time.sleep(SECONDS_FOR_FIRST_RANK + self._pause)
        if LOCAL_RANK == 0 or process_status().reported_by_others() is None:
            print(ending.text, file=sys.stderr, flush=True)
        process_status().end(ending)
        report_to_launcher(ending)
        os._exit(ending.exit_code)


def leave_word(ending: Ending) -> None:
    """Tell the ranks of other hosts how this one ends before they watch each other.

    Nothing is done without other hosts, and where the launchers have no store: they restart all
    ranks then (TORCH_DISABLE_SHARE_RDZV_TCP_STORE).
    """
    has_other_hosts = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if not has_other_hosts or not launchers_have_store():
        return
    word = ending.with_place("before the first step").to_json()
    writer = threading.Thread(target=write_word, args=(word,), daemon=True)
    writer.start()
    writer.join(2 * SECONDS_TO_LEAVE_WORD)  # If the network drops packets, a call never returns.


def write_word(word: str) -> None:
    """Write what this rank says, if it is the first one that ends."""
    from torch.distributed import DistError  # This takes a second, and is rarely needed.

    try:
        open_store(name_of_list(), SECONDS_TO_LEAVE_WORD).compare_set(key_of_word(), "", word)
    except DistError:  # The launcher of the first host has ended: there is nobody to tell.
        return


@contextlib.contextmanager
def leaving_word(ending: Ending) -> Generator[None]:
    """Leave word after this context, in which the ending is recorded."""
    yield
    leave_word(ending)


def name_of_list() -> str:
    """Return the prefix of what ranks sign and say at the start.

    Where hosts leave, an earlier attempt with more ranks may have signed.
    """
    return f"{LIST}/{os.environ['WORLD_SIZE']}"


def key_of_word() -> str:
    """Return the key of what a rank says that ends in this attempt of the run."""
    return f"word/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def launchers_have_store() -> bool:
    """Return whether the store is in a launcher, and not in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(prefix: str, seconds: int, is_here: bool = False) -> Any:
    """Return a connection of this rank's own to the store at MASTER_ADDR:MASTER_PORT.

    Args:
        prefix: of the keys. Those of other prefixes are not seen.
        seconds: in which each call has to be answered.
        is_here: whether this process has the store, and makes it if it is not there yet.

    Raises:
        DistError: it could not be reached.
    """
    from torch import distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_here,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        multi_tenant=True,  # The process group uses the same one.
    )
    return dist.PrefixStore(prefix, store)


def words_of(ranks: list[int]) -> str:
    """Return such as "rank 3" or "ranks 2-5, 7" for numbers in order."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    words = [f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
