# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py as a user calls it: a launch command with another first word; a trace."""

import json
import sys

from launching import run
from measured.validation import BASE, config_of

SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}


def test_a_launch_command_becomes_its_plan(tmp_path):
    config_of(SMALL).save_pretrained(tmp_path / "model")
    launch = "--config_file accelerate_configs/fsdp.yaml --num_processes 4 --main_process_port 0 "
    launch += f"recipes/llama.py --model_name_or_path {tmp_path}/model "
    launch += f"--output_dir {tmp_path}/run --max_length 128 --use_peft"
    wishes = ["--gpu", "24GB", "--json", tmp_path / "plan.json", "--plot", tmp_path / "plan.png"]
    done = run(sys.executable, "scripts/plan_memory.py", *launch.split(), *wishes)
    assert done.returncode == 0, done.output
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["peak"] == sum(report["device"].values()) <= report["card"] == 24 * 10**9
    assert "FSDP2 FULL_SHARD, 4 x GPU" in done.output
    assert "fits" in done.output
    assert (tmp_path / "plan.png").stat().st_size > 20_000
    assert not (tmp_path / "run").exists()


def test_what_the_closed_form_does_not_know_can_be_traced(tmp_path):
    config_of(SMALL).save_pretrained(tmp_path / "model")
    call = f"scripts/plan_memory.py {tmp_path}/model "
    call += "--config_file accelerate_configs/single.yaml --use_peft --use_dora --max_length 64 "
    call += f"--simulate --json {tmp_path}/plan.json"
    done = run(sys.executable, *call.split())
    assert done.returncode == 0, done.output
    assert json.loads((tmp_path / "plan.json").read_text())["method"] == "traced"
