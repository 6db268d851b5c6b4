# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py as a user calls it: a launch command with another first word."""

import json
import re
import shlex

from accelerate.commands.launch import launch_command_parser

import plan_memory
from jobs import LLAMA_3_1_8B
from launching import REPO, script


def test_what_is_listed_fits_as_its_command_is_planned(net_tiny, tmp_path):
    def report_of(*words):
        path = tmp_path / "plan.json"
        script("plan_memory", "--json", path, "--gpu", "4GiB", *words, code=0)
        return json.loads(path.read_text())

    model = net_tiny("llama") / "model"
    report = report_of(model, "--num_gpus", 4, "--gradient_checkpointing", "--max_length", 1024)
    assert len(report["rows"]) > 4
    for row in (report["rows"][0], report["rows"][-1]):
        words = shlex.split(row["command"])
        assert words[:2] == ["accelerate", "launch"]
        launch = launch_command_parser().parse_args(words[2:])  # accelerate takes it
        assert launch.training_script == "recipes/llama.py" and (REPO / launch.config_file).exists()
        assert report_of(*words[2:])["peak"] == row["peak"] <= report["card"]


def settings_of(command):
    """The words of a launch as {flag: value}, without the names of model, rows and folders."""
    words = shlex.split(command)[2:]
    settings = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            value = words[place + 1] if place + 1 < len(words) else "--"
            settings[word] = True if value.startswith("--") else value
    for name in ("model_name_or_path", "dataset_name", "eval_split", "output_dir"):
        settings.pop(f"--{name}", None)
    if "--learning_rate" in settings:
        settings["--learning_rate"] = float(settings["--learning_rate"])
    return settings


def test_the_readme_plans_rehearses_and_trains_with_the_same_settings(tmp_path, in_process):
    text = (REPO / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^(?:python|accelerate) .*", text, re.MULTILINE)
    (plan,) = [command for command in commands if "plan_memory.py" in command]
    (rehearsal,) = [command for command in commands if "rehearse.py" in command]
    (train,) = [command for command in commands if "--output_dir runs/mine" in command]
    # The same shapes from a file, since the hub is out of reach
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    words = plan.replace("meta-llama/Llama-3.1-8B-Instruct", str(tmp_path / "config.json"))
    done = in_process(plan_memory, *shlex.split(words)[2:])
    assert done.code == 0
    planned = done.out.partition("Number 1:")[2].strip().split("\n\n")[0]
    settings = settings_of(planned.replace("\\\n", " "))
    assert settings == settings_of(train) and settings["--max_length"] == "2048"
    del settings["--num_processes"], settings["--max_length"]  # two processes, and a small model
    rehearsed = settings_of(rehearsal)
    assert rehearsed.pop("--max_steps") and rehearsed == settings
