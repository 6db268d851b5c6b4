# SPDX-License-Identifier: Apache-2.0
"""The copy of a run in an object store, which here is a folder (recipes/extras/object_store)."""

import json
import os
import shutil
import subprocess
import sys
import time

import net
from launching import RECIPE, REPO, TIMEOUT, read_json, read_metrics, recipe, run

FAULTS = REPO / "evidence" / "faults.py"
# A rehearsal would let a rank end before the others
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2
LIMIT = 10  # seconds for which ranks wait for each other


def words(net_tiny, folder, *more):
    steps = ["--max_steps", 4, "--save_steps", 2, "--eval_strategy", "no"]
    return [*net.data_of(net_tiny("llama")), *steps, "--output_dir", folder, *more]


def planted(*faults):
    return os.environ | {"FAULT": json.dumps(faults)}


def test_a_lost_folder_continues_from_the_store_to_the_same_weights(net_tiny, tmp_path):
    recipe(*words(net_tiny, tmp_path / "whole"), code=0)
    folder, url = tmp_path / "run", f"file://{tmp_path}/store"
    call = words(net_tiny, folder, "--output_url", url)
    stop = {"do": "SIGTERM", "at": "summed_loss", "step": 3}
    run(sys.executable, FAULTS, RECIPE, *call, env=planted(stop), code=75)
    shutil.rmtree(folder)
    done = recipe(*call, code=0)
    assert f"Fetching checkpoint-3 from {url}" in done.output, done.output
    for place in (folder, tmp_path / "store"):
        result = (place / "model.safetensors").read_bytes()
        assert result == (tmp_path / "whole" / "model.safetensors").read_bytes()
        assert [line["step"] for line in read_metrics(place)[0]] == [1, 2, 3, 4]
    assert read_json(tmp_path / "store" / "status.json")["state"] == "done"


def test_all_ranks_wait_for_the_upload_of_the_last_checkpoint(net_tiny, tmp_path):
    """For longer than they wait for each other, and torchrun for a rank that it asks to end."""
    begun, store = tmp_path / "begun", tmp_path / "store"
    slow = {"do": "wait", "at": "extras.object_store.store:ObjectStore._upload"}
    stop = {"do": "SIGTERM", "at": "summed_loss", "step": 3, "rank": 0}
    more = ["--ddp_timeout", LIMIT, "--output_url", f"file://{store}"]
    command = [*TORCHRUN, FAULTS, RECIPE, *words(net_tiny, tmp_path / "run", *more)]
    command += ["--save_steps", 0]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=planted(slow | {"file": str(begun), "seconds": TIMEOUT}, stop)
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + TIMEOUT
    while not begun.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(LIMIT + 25)  # torch/distributed/elastic/multiprocessing/api.py, _close: 30 s
    begun.unlink()
    output, _ = process.communicate(timeout=TIMEOUT)
    assert "Stopped and saved after step 3 of 4" in output and "error:" not in output, output
    assert (store / "checkpoint-3" / "manifest.json").is_file()
