# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet wait for each other in bounded time, and know for whom and why."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from components import meeting
from components.meeting import Meeting, leave_word, words_of
from components.status import Ending
from ranks import free_port

HOSTS_DIFFER = "was started for a run on 2 hosts, and "


class EndedError(Exception):
    """Instead of the end of a process."""


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    """A launcher with a store, which has started two ranks on two hosts."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "SECONDS_TO_READ", 0.5)
    yield server


@pytest.fixture
def fork():
    """A function that calls another one in a process, which ends with the test at the latest."""
    context = multiprocessing.get_context("fork")
    processes = []

    def start(function, *arguments):
        processes.append(context.Process(target=function, args=arguments))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def ranks(monkeypatch):
    """A function that lets ranks meet, and returns {rank: how it ended, "" if it continued}."""

    def end(self, ending):
        raise EndedError(ending.exit_code, ending.text)

    monkeypatch.setattr(Meeting, "_end", end)

    def come(rank, num_hosts, seconds, endings):
        one = Meeting(seconds)
        one.rank = rank
        one.num_hosts = num_hosts
        try:
            one.wait_for_all("start")
            endings[rank] = ""
        except EndedError as ended:
            endings[rank] = ended.args

    def meet(num_hosts, seconds=20):
        endings = {}
        threads = []
        for rank, number in num_hosts.items():
            words = (rank, number, seconds, endings)
            threads.append(threading.Thread(target=come, args=words))
            threads[-1].start()
        for thread in threads:
            thread.join(30)
        return endings

    return meet


def test_ranks_that_all_come_continue(ranks):
    assert ranks({0: "2", 1: "2"}) == {0: "", 1: ""}


@pytest.mark.parametrize("there", [0, 1])
def test_a_rank_that_never_comes_is_named(there, ranks):
    code, line = ranks({there: "2"}, seconds=1)[there]
    assert code == 1
    assert line.startswith(f"error: rank {1 - there} of 2 did not come within 1 s of rank {there} ")


def test_after_a_while_a_line_says_for_whom_a_host_waits(ranks, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "SECONDS_UNTIL_WARNING", 0.2)
    ranks({0: "2"}, seconds=2)
    assert capsys.readouterr().err.endswith(" waits for rank 1, for 2 s at most\n")


def test_hosts_of_runs_of_different_sizes_end_with_64(ranks):
    endings = ranks({0: "2", 1: "3"})
    assert [code for code, _ in endings.values()] == [64, 64]
    assert HOSTS_DIFFER in endings[0][1] and endings[0] == endings[1]


def test_a_rank_that_ends_before_leaves_word(ranks):
    leave_word(Ending.failed(64, "no such flag"))
    code, line = ranks({0: "2"})[0]
    assert code == 64 and line.endswith("ended before the first step: no such flag")


def test_ranks_that_have_all_come_do_not_wait_for_ever_for_rank_0(ranks, monkeypatch):
    """It freezes after it has signed, and does not say that all are here."""
    monkeypatch.setattr(meeting, "SECONDS_TO_ANSWER", 1)
    Meeting(1)._store.set("start/0", "")
    code, line = ranks({1: "2"}, seconds=1)[1]
    assert code == 1
    assert line.startswith("error: rank 0 does not answer: all 2 ranks have come, and it did not")


def meet(rank, local_rank, seconds_later=0):
    """Be a rank that meets the others."""
    meeting.RANK = rank
    meeting.LOCAL_RANK = local_rank
    time.sleep(seconds_later)
    Meeting(20).wait_for_all("start")


def test_each_host_says_why_once_whichever_of_its_ranks_learns_it_first(fork, monkeypatch, capfd):
    """The launcher ends the other ranks of a host as soon as one has ended."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    leave_word(Ending.failed(64, "no such flag"))
    first = fork(meet, 2, 0, 1)
    second = fork(meet, 3, 1)
    multiprocessing.connection.wait([first.sentinel, second.sentinel], 30)
    for process in (first, second):
        process.kill()
    assert capfd.readouterr().err.count("ended before the first step: no such flag") == 1


def test_a_host_whose_first_rank_never_comes_says_why_too(fork, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(meeting, "SECONDS_FOR_FIRST_RANK", 0.5)
    leave_word(Ending.failed(64, "no such flag"))
    fork(meet, 3, 1).join(30)
    assert "ended before the first step: no such flag" in capfd.readouterr().err


def test_word_of_an_earlier_attempt_does_not_count(ranks, monkeypatch):
    leave_word(Ending.failed(64, "no such flag"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ranks({0: "2", 1: "2"}) == {0: "", 1: ""}


class CountingStore:
    """A store that counts the requests to it."""

    def __init__(self, store):
        self.store = store
        self.requests = 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


def test_the_missing_of_many_ranks_are_found_by_few_requests(launcher, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1024")
    one = Meeting(20)
    absent = list(range(504, 512))  # a host
    for rank in range(1024):
        if rank not in absent:
            one._store.set(f"start/{rank}", "")
    one._store = CountingStore(one._store)
    assert one._missing("start", list(range(1024))) == absent
    assert one._store.requests < 64


@pytest.mark.parametrize("number", [2, 64, 1024])
def test_the_requests_of_waiting_ranks_are_bounded(number, monkeypatch):
    """Each look is two requests: whether all are here, and whether a rank has left word."""
    monkeypatch.setenv("WORLD_SIZE", str(number))
    monkeypatch.setattr(meeting, "RANK", 1)
    one = Meeting(3)
    one._store = CountingStore(one._store)
    monkeypatch.setattr(one, "_leave", lambda ending: one._store.set(f"start/{meeting.ALL}", ""))
    start = time.monotonic()
    one.wait_for_all("start")
    pauses = (time.monotonic() - start) / one._pause
    at_end = 2 * number + 3  # All are missing, which are found one after the other.
    assert one._store.requests - at_end <= 2 * (pauses + 2)
    assert number / one._pause <= meeting.LOOKS_PER_SECOND


@pytest.mark.usefixtures("ranks")
def test_a_store_that_cannot_be_reached_ends_with_one_line(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(EndedError, match="cannot reach the other ranks at 127.0.0.1:"):
        Meeting(1)


def have_store(port):
    """Be a launcher that has the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.value = server.port
    time.sleep(600)


@pytest.fixture
def other_launcher(fork, monkeypatch):
    """The process of another host that has the store."""
    port = multiprocessing.get_context("fork").Value("i", 0)
    process = fork(have_store, port)
    while not port.value:
        assert process.is_alive()
        time.sleep(0.01)
    monkeypatch.setenv("MASTER_PORT", str(port.value))
    return process


@pytest.mark.parametrize("freezes", ["before the rank comes", "while the rank waits"])
def test_a_store_that_no_longer_answers_ends_a_rank_in_bounded_time(
    freezes, other_launcher, fork, monkeypatch, capfd
):
    """As if the network dropped all packets: the connection stays, and no call to it returns."""
    monkeypatch.setattr(meeting, "SECONDS_TO_ANSWER", 2)
    seconds = 1 if freezes == "before the rank comes" else 100
    store = meeting.open_store(meeting.name_of_list(), 20)
    if freezes == "before the rank comes":
        os.kill(other_launcher.pid, signal.SIGSTOP)
    monkeypatch.setattr(meeting, "RANK", 1)
    rank = fork(lambda: Meeting(seconds).wait_for_all("start"))
    if freezes == "while the rank waits":
        store.wait(["start/1"])
        os.kill(other_launcher.pid, signal.SIGSTOP)
    rank.join(20)
    assert rank.exitcode == 1
    [line] = capfd.readouterr().err.splitlines()
    assert "cannot reach the other ranks at 127.0.0.1:" in line
    assert line.endswith("which rank 0's host has: no answer for 2 s")


def test_a_store_that_no_longer_answers_does_not_keep_a_rank_that_ends(other_launcher, monkeypatch):
    monkeypatch.setattr(meeting, "SECONDS_TO_LEAVE_WORD", 0.5)
    os.kill(other_launcher.pid, signal.SIGSTOP)
    start = time.monotonic()
    leave_word(Ending.failed(64, "no such flag"))
    assert time.monotonic() - start < 10


def test_without_other_ranks_nothing_is_done(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    Meeting(1).wait_for_all("start")
    leave_word(Ending.failed(1, "why"))


def train_after_meeting(rank, sums):
    """Be a rank whose launcher has no store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE)."""
    os.environ["RANK"] = str(rank)
    meeting.RANK = rank
    both = Meeting(30)
    both.wait_for_all("start")
    dist.init_process_group("gloo")
    both.wait_for_all("checked")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    sums.put(int(ones))


def test_where_the_launcher_has_no_store_rank_0_makes_it_also_for_the_process_group(
    fork, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    sums = multiprocessing.get_context("fork").Queue()
    for rank in (1, 0):
        fork(train_after_meeting, rank, sums)
    assert [sums.get(timeout=60) for _ in range(2)] == [2, 2]


def test_many_ranks_are_named_in_few_words():
    assert words_of([3]) == "rank 3"
    assert words_of([2, 3, 4, 7, 9, 10]) == "ranks 2-4, 7, 9-10"
