# SPDX-License-Identifier: Apache-2.0
"""Runs whose folder is copied to a server that speaks S3."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from launching import CONFIGS, RECIPE, REPO, TIMEOUT, read_json, read_metrics, recipe, rehearse

FAULTS = REPO / "evidence" / "faults.py"
# Two ranks, with planted faults
REHEARSAL = REPO / "scripts/rehearse.py", "--device", "cpu", "--config_file", CONFIGS / "ddp.yaml"
REHEARSAL += (FAULTS,)
STEPS = 6
ROWS = 8  # in a step


def words(tiny, output_dir, url, *more):
    return [
        *["--model_name_or_path", tiny / "model", "--dataset_name", tiny / "data/train.jsonl"],
        *["--max_steps", STEPS, "--save_steps", 2, "--output_dir", output_dir],
        *["--output_url", url, *more],
    ]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of the run that is not interrupted and has no copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    plain = words(tiny, folder, "")[:-2]
    done = recipe(*plain)
    assert done.returncode == 0, done.output
    return folder


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()


def losses_of(folder):
    """The loss of each step, of which none is missing or there twice."""
    lines = read_metrics(folder)[0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def test_a_lost_folder_continues_under_another_strategy(store, tiny, whole, tmp_path):
    url = "s3://runs/lost"
    batch = ["--per_device_train_batch_size", ROWS // 2]  # on two ranks
    stop = {"do": "SIGTERM", "at": "summed_loss", "step": 3, "rank": 0}
    process = start(words(tiny, tmp_path / "first", url, *batch), stop, launcher=REHEARSAL)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert "Stopped and saved after step 3 of 6" in output, output
    shutil.rmtree(tmp_path / "first")
    second = rehearse("fsdp2_full_shard", *words(tiny, tmp_path / "second", url, *batch))
    assert second.returncode == 0, second.output
    assert "Fetching checkpoint-3 " in second.output and "Continuing from" in second.output
    # Two ranks add up a loss in another order than one, which moves its last bits
    assert losses_of(tmp_path / "second") == pytest.approx(losses_of(whole), rel=1e-5)


def test_a_store_that_goes_away_does_not_end_the_run(store, tiny, whole, tmp_path):
    url = "s3://runs/away"
    folder = tmp_path / "run"
    process = start(words(tiny, folder, url))
    try:
        wait_until((folder / "checkpoint-2").exists, process)
        store.stop()
        errors, _ = process.communicate(timeout=TIMEOUT)
    finally:
        store.start()
    assert process.returncode == 69, errors
    assert f"error: the result is only in {folder}: --output_url {url}: " in errors
    assert weights_of(folder) == weights_of(whole)
    assert read_json(folder / "status.json")["exit_code"] == 69
    again = recipe(*words(tiny, folder, url))
    assert again.returncode == 0 and "Nothing is left to do" in again.output, again.output


def test_wrong_credentials_end_before_the_model_is_loaded(store, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    done = recipe(*words(tiny, tmp_path / "run", "s3://runs/denied"))
    assert done.returncode == 69 and "--output_url" in done.output, done.output
    assert "Traceback" not in done.output and "Loading weights" not in done.output


def start(arguments, *faults, launcher=(FAULTS,)):
    """Start the recipe with planted faults."""
    command = [sys.executable, *launcher, RECIPE, *arguments]
    return subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {"FAULT": json.dumps(faults)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(is_so, process):
    """Return once something is so, while a process is running."""
    end = time.monotonic() + TIMEOUT
    while not is_so():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)
