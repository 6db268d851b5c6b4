# SPDX-License-Identifier: Apache-2.0
"""What clusters/torchrun_elastic.sh refuses, waits for and says, with a stand-in for the launcher.

tests/cluster and tests/hosts run it with torchrun.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from slurm_cluster import free_ports

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "accelerate_configs"
# What starts the ranks: it writes the words that it was given, and a status if there is to be one.
LAUNCHER = """#!/bin/bash
printf '%s\\n' "$@" > "$WORDS"
[[ $STATUS ]] && sleep 0.05 && echo "$STATUS" > "$OUTPUT_DIR/status.json"
exit "$CODE"
"""
NO_GPUS = "#!/bin/bash\nexit 127\n"
# What the script calls to check the words of a recipe, which takes a real one seconds
RECIPE = "Arguments = parse = str\n"


@pytest.fixture
def program(tmp_path):
    """A function that writes a program, and returns the folder to put before PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        return folder

    return write


@pytest.fixture
def start(program, tmp_path):
    """A function that starts the script, and returns its process."""
    program("nvidia-smi", NO_GPUS)
    folder = program("launcher", LAUNCHER)
    program("recipe.py", RECIPE)
    started = []

    def start(*words, code=0, status="", **changes):
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "RECIPE": str(folder / "recipe.py"),
            "CONFIG": str(CONFIGS / "fsdp.yaml"),
            "LAUNCHER": shlex.quote(str(folder / "launcher")),
            "OUTPUT_DIR": str(tmp_path / "run"),
            "MEETING": f"127.0.0.1:{free_ports(1)[0]}",
            "HOSTS": "1:2",
            "GPUS": "2",
            "BATCH": "2",
            "ROWS_PER_STEP": "8",
            "WORDS": str(tmp_path / "words"),
            "STATUS": status,
            "CODE": str(code),
        }
        process = subprocess.Popen(
            [str(REPO / "clusters" / "torchrun_elastic.sh"), *words],
            env=environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def call(start):
    """A function that runs the script, and returns its exit code and what it says."""

    def call(*words, **options):
        process = start(*words, **options)
        told, _ = process.communicate(timeout=60)
        return process.returncode, told

    return call


# ---- Refused in one line ----
MEETINGS = ("", ":", "host1", ":29400", "host1:x", "a b:1", "host1:65536", "no-such-host.invalid:1")
WRONG = {
    "RECIPE": ["missing.py", "recipes/llama_pipeline.py"],
    "CONFIG": ["missing.yaml", "accelerate_configs/single.yaml", "accelerate_configs/tp.yaml"],
    "MEETING": MEETINGS,
    "HOSTS": ["", "all", "0:2", "1:08", "1:", "1:2:3", "9" * 20, "4:1"],
    "ROWS_PER_STEP": ["", "08", "12"],
    "BATCH": ["two"],
    "GPUS": ["0", "abc", "1 2", "08", "-1", "RANDOM", "9" * 20],
    "JOIN_TIMEOUT": ["10m"],
    "OUTPUT_DIR": [""],
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_variable_is_refused_in_one_line(variable, call, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    for value in WRONG[variable]:
        code, told = call(**{variable: value})
        assert told.startswith(f"error: {variable}"), value
        assert (code, told.count("\n")) == (64, 1)
        assert not (tmp_path / "words").exists()


@pytest.mark.parametrize(
    ("flag", "variable"),
    [
        ("--output_dir", "OUTPUT_DIR"),
        ("--per_device_train_batch_size", "BATCH"),
        ("--gradient_accumulation_steps", "ROWS_PER_STEP"),
    ],
)
@pytest.mark.parametrize("form", ["{} 4", "{}=4"])
def test_a_flag_that_a_variable_decides_is_refused(flag, variable, form, call):
    for spelled in (flag, "--" + flag[2:].replace("_", "-")):
        code, told = call("--seed", "1", *form.format(spelled).split())
        assert told.startswith(f"error: {variable} ")
        assert (code, told.count("\n")) == (64, 1)


# ---- Taken ----
@pytest.mark.parametrize(
    ("name", "hosts"), [("ddp", "1:2"), ("fsdp1_hybrid_shard", "2"), ("deepspeed_zero3", "2:2")]
)
def test_a_yaml_for_any_number_of_ranks_is_taken(name, hosts, call, tmp_path):
    config = str(CONFIGS / f"{name}.yaml")
    assert call("--seed", "1", CONFIG=config, HOSTS=hosts) == (0, "")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--config_file") + 1] == config
    assert words[-2:] == ["--seed", "1"]
