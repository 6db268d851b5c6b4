# SPDX-License-Identifier: Apache-2.0
"""Two hosts that train together lose each other, or disagree.

Some six minutes on two busy cores: `make test-hosts`. Skipped, with the reason, where no network
namespace can be made.
"""

import json
import os
from pathlib import Path

import pytest

from extras.hosts.watch import SECONDS_OF_SILENCE
from launching import RECIPE, REPO, read_json, read_metrics, recipe
from two_hosts import LAUNCH_SECONDS, wait_until

FAULTS = REPO / "evidence" / "faults.py"
STEPS = 12
WAIT = 5  # seconds for which the fault holds a rank, while the test loses a host
# Beside the silence after which a host is lost: a busy machine, telling others, and torchrun's end
MORE_SECONDS = 25


def job(tiny, folder, per_rank=4):
    """The arguments of a run of 12 steps with checkpoints after 5, 10 and 12."""
    words = ["--model_name_or_path", tiny / "model", "--dataset_name"]
    words += [tiny / "data" / "train.jsonl", "--output_dir", folder, "--report_to", "none"]
    words += ["--max_steps", STEPS, "--save_steps", 5, "--learning_rate", "1e-3"]
    return [*words, "--per_device_train_batch_size", per_rank]


def start(hosts, tiny, folder, faults=(), words_b=()):
    """Start the recipe on both hosts, with planted faults and further words on the second."""
    environment = {"FAULT": json.dumps(faults)}
    launches = []
    for host, words in zip(hosts, ((), words_b), strict=True):
        log = folder.parent / f"{host.name}.log"
        command = [FAULTS, RECIPE, *job(tiny, folder), *words]
        launches.append(host.start(command, log, hosts[0], environment))
    return launches


def ranks_gone(hosts):
    """Whether no rank of the recipe is left; launchers may be."""
    for host in hosts:
        for process in host.processes():
            try:
                words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            except OSError:  # It has ended.
                continue
            if RECIPE in words and "torch.distributed.run" not in words:
                return False
    return True


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """The losses of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    on_cpu = os.environ | {"ACCELERATE_USE_CPU": "true"}
    recipe(*job(tiny, folder, per_rank=8), env=on_cpu, code=0)
    return [line["loss"] for line in read_metrics(folder)[0]]


def lose(what, host):
    if what == "killed":
        host.kill()
    else:
        host.cut_off()


@pytest.mark.parametrize("what", ["cut off", "killed"])
def test_a_lost_host_ends_all_and_the_same_command_goes_on(what, hosts, tiny, tmp_path, alone):
    marker = tmp_path / "now"
    fault = {"do": "wait", "at": "summed_loss", "step": 8, "rank": 0, "file": str(marker)}
    folder = tmp_path / "run"
    launches = start(hosts, tiny, folder, [fault | {"seconds": WAIT}])
    wait_until(marker.exists, 200)
    lose(what, hosts[1])
    wait_until(lambda: ranks_gone(hosts), WAIT + SECONDS_OF_SILENCE + MORE_SECONDS)
    if what == "cut off":  # gloo names the address of one that is killed
        for launch, other in zip(launches, reversed(hosts), strict=True):
            [line] = launch.errors()
            assert f"no answer for {SECONDS_OF_SILENCE} s from {other.name} (" in line
            assert "the same command continues" in line
        assert "no answer for" in read_json(folder / "status.json")["why"]
    status = read_json(folder / "status.json")
    assert status["state"] == "failed" and status["exit_code"] == 1 and status["step"] == 8

    for host in hosts:
        host.connect()
        host.kill()
    again = start(hosts, tiny, folder)
    assert [launch.end() for launch in again] == [0, 0], again[0].output[-3000:]
    assert f"Continuing from {folder}/checkpoint-" in again[0].output
    lines = read_metrics(folder)[0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # Two ranks add up a loss in another order than one, which moves its last bits
    assert [line["loss"] for line in lines] == pytest.approx(alone, rel=1e-5)


def test_without_the_host_of_the_store_the_others_end(hosts, tiny, tmp_path):
    marker = tmp_path / "now"
    fault = {"do": "wait", "rank": 1, "at": "summed_loss", "step": 8}
    fault |= {"file": str(marker), "seconds": WAIT}
    launches = start(hosts, tiny, tmp_path / "run", [fault])
    wait_until(marker.exists, LAUNCH_SECONDS)
    hosts[0].kill()
    assert launches[1].end(WAIT + SECONDS_OF_SILENCE + MORE_SECONDS) != 0


def test_an_output_folder_that_only_one_host_sees_is_refused(hosts, tiny, tmp_path):
    other = ["--output_dir", tmp_path / "other"]
    launches = start(hosts, tiny, tmp_path / "run", words_b=other)
    assert [launch.end() for launch in launches] == [1, 1]
    [line] = launches[0].errors()
    assert "is not the same folder on host-b (1) as on host-a (0)" in line
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 64
    assert not list(tmp_path.rglob(".seen*"))


def test_a_checkpoint_that_one_host_cannot_write_ends_both_and_the_one_before_is_whole(
    hosts, tiny, tmp_path, alone
):
    folder = tmp_path / "run"
    full = {"do": "refuse at byte", "number": 1_000_000, "at": "write_share", "call": 2, "rank": 1}
    launches = start(hosts, tiny, folder, [full])
    assert [launch.end() for launch in launches] == [1, 1], launches[0].output[-3000:]
    [line] = launches[0].errors()
    assert "the checkpoint after step 10 could not be finished: " in line and "too large" in line
    assert "older checkpoints, if there are any, were not touched" in line
    assert read_json(folder / "status.json")["exit_code"] == 73
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-5"]

    again = start(hosts, tiny, folder)
    assert [launch.end() for launch in again] == [0, 0], again[0].output[-3000:]
    assert f"Continuing from {folder}/checkpoint-5" in again[0].output
    losses = [line["loss"] for line in read_metrics(folder)[0]]
    assert losses == pytest.approx(alone, rel=1e-5)
