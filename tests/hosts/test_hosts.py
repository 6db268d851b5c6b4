# SPDX-License-Identifier: Apache-2.0
"""Two hosts that train together lose each other, disagree, and wait in vain.

Some twelve minutes on two busy cores: `make test-hosts`. Skipped, with the reason, where no network
namespace can be made.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from launching import RECIPE, REPO, read_json, read_metrics, recipe
from two_hosts import LAUNCH_SECONDS, wait_until

FAULTS = REPO / "evidence" / "faults.py"
SECONDS_OF_SILENCE = 30
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


def start(hosts, tiny, folder, faults=(), words=(), words_b=(), ranks=1, **environment_b):
    """Start the recipe on both hosts, with planted faults and what differs on the second."""
    planted = {"FAULT": json.dumps(faults)}
    commands = [
        [FAULTS, RECIPE, *job(tiny, folder), *words],
        [FAULTS, RECIPE, *job(tiny, folder), *words, *words_b],
    ]
    environments = planted, planted | environment_b
    launches = []
    for host, command, environment in zip(hosts, commands, environments, strict=True):
        log = folder.parent / f"{host.name}.log"
        launches.append(host.start(command, log, hosts[0], environment, ranks))
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
    done = recipe(*job(tiny, folder, per_rank=8), env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.output[-3000:]
    return [line["loss"] for line in read_metrics(folder)[0]]


def lose(what, host):
    if what == "killed":
        host.kill()
    else:
        host.cut_off()


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("cut off in a step", {"at": "summed_loss", "step": 8}),
        ("cut off in a save", {"at": "save", "call": 2}),
        ("killed", {"at": "summed_loss", "step": 8}),
    ],
)
def test_a_lost_host_ends_all_and_the_same_command_goes_on(
    what, fault, hosts, tiny, tmp_path, alone
):
    marker = tmp_path / "now"
    fault = {"do": "wait", "rank": 0, "file": str(marker), "seconds": WAIT} | fault
    folder = tmp_path / "run"
    launches = start(hosts, tiny, folder, [fault])
    wait_until(marker.exists, 200)
    lose(what, hosts[1])
    wait_until(lambda: ranks_gone(hosts), WAIT + SECONDS_OF_SILENCE + MORE_SECONDS)
    survivors = launches[:1] if what == "killed" else launches
    for launch in survivors:
        [line] = launch.errors()
        assert "no answer for" in line and "the same command continues" in line
    [line] = launches[0].errors()
    step = fault.get("step", 10)  # The second save is after step 10.
    assert "from host host-b (rank 1), last in step" in line
    assert f"rank 0 on host-a ends in step {step};" in line
    status = read_json(folder / "status.json")
    assert status["state"] == "failed" and status["exit_code"] == 1
    assert "no answer for" in status["why"] and status["step"] == step

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
    [line] = launches[1].errors()
    assert "from host host-a (rank 0), last in step" in line
    assert "rank 1 on host-b ends in step 8;" in line


def test_an_output_folder_that_only_one_host_sees_is_refused(hosts, tiny, tmp_path):
    other = ["--output_dir", tmp_path / "other"]
    launches = start(hosts, tiny, tmp_path / "run", words_b=other)
    assert [launch.end() for launch in launches] == [1, 1]
    for launch in launches:
        [line] = launch.errors()
        assert "is not the same folder on host-b as on host-a: pass a folder on a file sys" in line
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 64
    assert not list(tmp_path.rglob(".seen*"))


def test_other_versions_on_a_host_are_refused(hosts, tiny, tmp_path):
    about = tmp_path / "packages" / "accelerate-99.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n")
    packages = str(tmp_path / "packages")
    launches = start(hosts, tiny, tmp_path / "run", PYTHONPATH=packages)
    assert [launch.end() for launch in launches] == [1, 1]
    for launch in launches:
        [line] = launch.errors()
        assert "and 99.0 on host-b: install the same versions on all hosts" in line
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 64


CLOCK = """
import time

right = time.time
time.time = lambda: right() + 3600
"""


def test_clocks_that_are_an_hour_apart_are_told_and_change_nothing(hosts, tiny, tmp_path, alone):
    (tmp_path / "sitecustomize.py").write_text(CLOCK)  # Python imports it at its start
    folder = tmp_path / "run"
    launches = start(hosts, tiny, folder, PYTHONPATH=str(tmp_path))
    assert [launch.end() for launch in launches] == [0, 0], launches[0].output[-3000:]
    line = "warning: the clock of host-b is 3600 s ahead of that of host-a: times in their logs"
    assert launches[0].output.count(line) == 1
    assert read_json(folder / "status.json")["state"] == "done"
    losses = [line["loss"] for line in read_metrics(folder)[0]]
    assert losses == pytest.approx(alone, rel=1e-5)


def test_another_precision_on_a_host_is_refused(hosts, tiny, tmp_path):
    launches = start(hosts, tiny, tmp_path / "run", ACCELERATE_MIXED_PRECISION="bf16")
    assert [launch.end() for launch in launches] == [1, 1]
    for launch in launches:
        [line] = launch.errors()
        assert line.endswith(
            "mixed precision is no on host-a and bf16 on host-b: launch all hosts with the same "
            "--config_file"
        )
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 64


def test_a_full_disk_on_one_host_ends_the_ranks_of_both(hosts, tiny, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if command_fails("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk):
        pytest.skip("no file system can be mounted here")
    try:
        launches = start(hosts, tiny, tmp_path / "run", HF_DATASETS_CACHE=str(disk))
        codes = [launch.end() for launch in launches]
    finally:
        assert not command_fails("umount", "-l", disk)
    assert codes == [1, 1]
    for launch in launches:
        [line] = launch.errors()
        assert f"the cache {disk} cannot take it: No space left on device: make room" in line
    assert "rank 1 on host-b ended in step 0" in launches[0].errors()[0]
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == 73


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


def command_fails(*words):
    return subprocess.run(words, capture_output=True).returncode != 0
