# SPDX-License-Identifier: Apache-2.0
"""Runs whose folder is copied to a server that speaks S3."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launching import RECIPE, TIMEOUT, read_json, recipe, rehearse

STEPS = 6


def words(tiny, output_dir, url, *more):
    return [
        *["--model_name_or_path", tiny / "model", "--dataset_name", tiny / "data/train.jsonl"],
        *["--max_steps", STEPS, "--save_steps", 2, "--output_dir", output_dir],
        *["--output_url", url, *more],
    ]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The weights of the run that is not interrupted and has no copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    plain = words(tiny, folder, "")[:-2]
    done = recipe(*plain)
    assert done.returncode == 0, done.output
    return (folder / "model.safetensors").read_bytes()


def test_a_lost_folder_continues_under_another_strategy(store, tiny, whole, tmp_path):
    url = "s3://runs/lost"
    first = rehearse("ddp", *words(tiny, tmp_path / "first", url, "--max_steps", 4))
    assert first.returncode == 0, first.output
    shutil.rmtree(tmp_path / "first")
    more = ["--max_steps", STEPS, "--allow_change", "max_steps"]
    second = rehearse("ddp", *words(tiny, tmp_path / "second", url, *more))
    assert second.returncode == 0, second.output
    assert "Fetching checkpoint-4-" in second.output and "Continuing from" in second.output
    steps = [line for line in (tmp_path / "second/metrics.jsonl").read_text().splitlines()]
    assert [f'"step": {number},' in line for number, line in enumerate(steps, 1)] == [True] * STEPS
    # A third machine finds the run done, with its result.
    third = rehearse("ddp", *words(tiny, tmp_path / "third", url, *more))
    assert third.returncode == 0 and "Nothing is left to do" in third.output, third.output
    name = "model.safetensors"
    assert (tmp_path / "third" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_nothing_is_lost_by_kill_9(store, tiny, whole, tmp_path):
    url = "s3://runs/killed"
    command = [sys.executable, RECIPE, *words(tiny, tmp_path / "run", url)]
    process = subprocess.Popen([str(word) for word in command], start_new_session=True)
    try:
        wait_for(tmp_path / "run" / "checkpoint-4", process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(tmp_path / "run")
    done = recipe(*words(tiny, tmp_path / "run", url))
    assert done.returncode == 0 and "Fetching checkpoint-" in done.output, done.output
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == whole


def test_a_store_that_goes_away_does_not_end_the_run(store, tiny, whole, tmp_path):
    url = "s3://runs/away"
    folder = tmp_path / "run"
    command = [sys.executable, RECIPE, *words(tiny, folder, url)]
    process = subprocess.Popen(
        [str(word) for word in command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(folder / "checkpoint-2", process)
        store.stop()
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        store.start()
    assert process.returncode == 69, errors
    assert f"error: the result is only in {folder}: --output_url {url}: cannot be" in errors
    assert (folder / "model.safetensors").read_bytes() == whole
    assert read_json(folder / "status.json")["exit_code"] == 69
    again = recipe(*words(tiny, folder, url))
    assert again.returncode == 0 and "Nothing is left to do" in again.output, again.output
    shutil.rmtree(folder)
    fetched = recipe(*words(tiny, folder, url))
    assert fetched.returncode == 0 and "Nothing is left to do" in fetched.output, fetched.output
    assert (folder / "model.safetensors").read_bytes() == whole


def test_wrong_credentials_end_before_the_model_is_loaded(store, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    done = recipe(*words(tiny, tmp_path / "run", "s3://runs/denied"))
    assert done.returncode == 73 and "permission denied" in done.output, done.output
    assert "Traceback" not in done.output and "Loading weights" not in done.output


def wait_for(path, process):
    """Return once a file or folder is there."""
    end = time.monotonic() + TIMEOUT
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
