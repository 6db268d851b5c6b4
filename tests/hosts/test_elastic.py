# SPDX-License-Identifier: Apache-2.0
"""clusters/torchrun_elastic.sh over two hosts: one is lost, and comes back, in one run.

They may be started in any order.
"""

import json
import os
import sys
import time

import pytest

from launching import CONFIGS, read_metrics, recipe
from two_hosts import LAUNCH_SECONDS, PORT, wait_until

STEPS = 24
ROWS = 8  # in a step
SAVED_EACH = 5
LOST_IN = 8
WAIT = 5  # seconds for which that step waits for the loss
COMES_BACK_IN = 16
LONGER_THAN_TORCH_WAITS = 65  # seconds: its read_timeout is 60


def start(host, first, tiny, folder, faults=(), hosts="1:2"):
    """Start the script on a host; `first` is the one where the hosts meet."""
    variables = {
        "LAUNCHER": "accelerate launch --quiet --mixed_precision no",
        # CPU ranks, with planted faults
        "RANK_PROGRAM": f"env ACCELERATE_USE_CPU=true {sys.executable} evidence/faults.py",
        "RECIPE": "recipes/llama.py",
        "CONFIG": str(CONFIGS / "ddp.yaml"),
        "GPUS": "1",
        "OUTPUT_DIR": str(folder / "run"),
        "MEETING": f"{first.address}:{PORT}",
        "HOSTS": hosts,
        "ROWS_PER_STEP": str(ROWS),
        "BATCH": str(ROWS // 2),
        # Enough for the second agent, which starts when the first one has the store
        "RDZV_CONF": "last_call_timeout=30",
        "PET_LOCAL_ADDR": host.address,
        "LOGLEVEL": "INFO",  # The agent then says that it has seen a host that comes
        "FAULT": json.dumps(faults),
    }
    words = ["clusters/torchrun_elastic.sh", *job(tiny, folder), "--save_steps", SAVED_EACH]
    log = folder / f"{host.name}-{len(host.launches)}.log"
    return host.run(words, log, variables)


def job(tiny, folder):
    """The arguments of an epoch of 24 steps."""
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", folder / "rows.jsonl"]
    return [*words, "--report_to", "none", "--logging_steps", 1, "--num_train_epochs", 1]


def write_rows(steps, tiny, folder):
    """Write the rows of an epoch of `steps` steps."""
    lines = (tiny / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[: steps * ROWS]))


def rows_of_steps(path):
    """{step: rows} of a rank, without what an attempt of the run did after the last checkpoint."""
    rows = {}
    last = 0
    for line in map(json.loads, path.read_text().splitlines()):
        if line["step"] < last:
            rows = {step: rows[step] for step in rows if step < line["step"]}
        last = line["step"]
        rows.setdefault(last, []).extend(line["rows"])
    return rows


def test_a_host_is_lost_and_comes_back_and_each_row_is_trained_on_once(hosts, tiny, tmp_path):
    first, second = hosts
    write_rows(STEPS, tiny, tmp_path)
    lost, comes_back = tmp_path / "lost", tmp_path / "comes back"
    record = {"do": "record rows", "at": "summed_loss", "file": str(tmp_path / "rows")}
    wait = {"do": "wait", "at": "summed_loss", "rank": 0}
    faults = [
        record,
        wait | {"step": LOST_IN, "file": str(lost), "seconds": WAIT},
        wait | {"step": COMES_BACK_IN, "file": str(comes_back), "seconds": LAUNCH_SECONDS},
    ]
    agent = start(first, first, tiny, tmp_path, faults)
    start(second, first, tiny, tmp_path, [record])
    wait_until(lost.exists, LAUNCH_SECONDS)
    second.kill()
    wait_until(comes_back.exists, LAUNCH_SECONDS)
    seen = agent.output.count("new nodes")
    other = start(second, first, tiny, tmp_path, [record])
    wait_until(lambda: agent.output.count("new nodes") > seen, LAUNCH_SECONDS)
    comes_back.unlink()
    assert agent.end() == 0, agent.output[-3000:]
    assert other.end() == 0, other.output[-3000:]

    losses = [line["loss"] for line in read_metrics(tmp_path / "run")[0]]
    alone = tmp_path / "alone"
    words = [*job(tiny, tmp_path), "--per_device_train_batch_size", ROWS, "--output_dir", alone]
    done = recipe(*words, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.output[-3000:]
    # Two ranks add up a loss in another order than one, which moves its last bits
    assert losses == pytest.approx([line["loss"] for line in read_metrics(alone)[0]], rel=1e-5)

    here = rows_of_steps(tmp_path / "rows.0")
    there = rows_of_steps(tmp_path / "rows.1")
    both = [step for step in here if len(here[step]) == ROWS // 2]
    # Two hosts until the last checkpoint before the loss, and again after the step of the return
    assert both == [*range(1, SAVED_EACH + 1), *range(COMES_BACK_IN + 1, STEPS + 1)]
    trained = [row for step in here for row in here[step]]
    trained += [row for step in both for row in there[step]]
    assert sorted(trained) == list(range(1, STEPS * ROWS + 1))


def test_a_host_that_is_started_first_waits_for_the_host_of_the_meeting(hosts, tiny, tmp_path):
    first, second = hosts
    write_rows(2, tiny, tmp_path)
    early = start(second, first, tiny, tmp_path, hosts="2")
    time.sleep(LONGER_THAN_TORCH_WAITS)
    waits = f"waiting up to 600 s for the same command on {first.address}, which does not answer"
    assert early.output.endswith(f"{waits} at {first.address}:{PORT} yet\n")
    agent = start(first, first, tiny, tmp_path, hosts="2")
    assert agent.end() == 0, agent.output[-3000:]
    assert early.end() == 0, early.output[-3000:]
    assert [line["step"] for line in read_metrics(tmp_path / "run")[0]] == [1, 2]
