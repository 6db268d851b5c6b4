# SPDX-License-Identifier: Apache-2.0
"""--dry_run reports everything that a start would, loads no weights and writes nothing; its
plan is a command that runs."""

import json
import sys

import pytest

from components import folder_lock
from launching import (
    CONFIGS,
    REPO,
    accelerate_launch,
    data_of,
    recipe,
    rehearse,
    run,
    words_of_plan,
)


def test_a_dry_run_prints_summary_and_plan_and_writes_nothing(tiny, tmp_path):
    (tmp_path / "no_weights").mkdir()
    for file in (tiny / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "no_weights" / file.name).write_bytes(file.read_bytes())
    command = ["--config_file", CONFIGS / "single.yaml", "--mixed_precision", "no"]
    command += ["recipes/llama.py", *data_of(tiny)]
    command[command.index(tiny / "model")] = tmp_path / "no_weights"
    done = accelerate_launch(*command, "--use_peft", "--output_dir", tmp_path / "run", "--dry_run")
    assert done.returncode == 0, done.output[-3000:]
    assert "one process, 1 x cpu" in done.output and "[[" in done.output and "disk: " in done.output
    assert not (tmp_path / "run").exists()
    plan = words_of_plan(done.output)
    assert plan[:3] == ["scripts/plan_memory.py", "--config_file", str(CONFIGS / "single.yaml")]
    planned = run(sys.executable, *plan, "--json", tmp_path / "plan.json")
    assert planned.returncode == 0, planned.output[-3000:]
    assert json.loads((tmp_path / "plan.json").read_text())["device"]["adapters"] > 0


def changes_of_files(folder):
    """When each file of a run was last changed, but for the lock, which every call but a dry run
    takes."""
    files = (path for path in folder.rglob("*") if path.name != folder_lock.NAME)
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_dry_run_leaves_the_files_of_a_run_as_they_are(tiny, tmp_path):
    job = [
        *data_of(tiny),
        "--output_dir",
        tmp_path / "run",
        "--max_steps",
        "2",
        "--save_steps",
        "1",
    ]
    assert recipe(*job).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done = recipe(*job, "--dry_run")
    assert done.returncode == 0 and "Dry run" in done.output, done.output[-3000:]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    without_lock = changes_of_files(tmp_path / "run")
    done = recipe(*job)  # nor does the same command itself, of a run that is done
    assert done.returncode == 0 and "Nothing is left to do: all 2 steps are done" in done.output, (
        done.output[-3000:]
    )
    assert "Loading weights" not in done.output and "Trained in" not in done.output
    assert changes_of_files(tmp_path / "run") == without_lock


def test_a_finished_run_without_checkpoints_is_not_trained_again(tiny, tmp_path):
    job = [
        *data_of(tiny),
        "--output_dir",
        tmp_path / "run",
        "--max_steps",
        "2",
        "--save_steps",
        "0",
    ]
    assert recipe(*job).returncode == 0
    before = changes_of_files(tmp_path / "run")
    done = recipe(*job)
    assert done.returncode == 0 and "Nothing is left to do: the run is done" in done.output, (
        done.output[-3000:]
    )
    assert changes_of_files(tmp_path / "run") == before
    done = recipe(*job, "--max_steps", "3")
    assert (
        done.returncode == 64
        and "had other values of max_steps, and no checkpoint is left" in done.output
    )
    done = recipe(*job, "--max_steps", "3", "--resume_from_checkpoint", "none")
    assert done.returncode == 0 and "Trained in" in done.output, done.output[-3000:]


def test_a_dry_run_finds_what_a_run_would_stop_at(tiny, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    wrong = [
        "--dataset_name",
        tmp_path / "rows.jsonl",
        "--output_dir",
        tmp_path / "run",
        "--dry_run",
    ]
    done = recipe("--model_name_or_path", tiny / "model", *wrong)
    assert done.returncode == 65 and "rows.jsonl" in done.output


@pytest.mark.cold("the recipe looks for its launcher among the processes above its own")
def test_the_production_yaml_is_checked_on_cpu_ranks(tiny, tmp_path):
    done = rehearse("fsdp", *data_of(tiny), "--output_dir", tmp_path / "run", "--dry_run")
    assert done.returncode == 0, done.output[-3000:]
    assert "FSDP2 FULL_SHARD, 2 x cpu" in done.output and f"{CONFIGS / 'fsdp.yaml'}" in done.output
    assert str(REPO) not in done.output.split("Dry run")[1]
