# SPDX-License-Identifier: Apache-2.0
"""What clusters/torchrun_elastic.sh refuses, with a stand-in for the launcher.

tests/cluster and tests/hosts run it with torchrun.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from ranks import free_port

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "accelerate_configs"
PROGRAMS = {
    # What starts the ranks: it writes the words that it was given
    "launcher": """#!/bin/bash\nprintf '%s\\n' "$@" > "$WORDS"\n""",
    "nvidia-smi": "#!/bin/bash\nexit 127\n",
    # What the script calls to check the words of a recipe, which takes a real one seconds
    "recipe.py": "Arguments = parse = str\n",
}


@pytest.fixture
def call(tmp_path):
    """A function that runs the script, and returns its exit code and what it says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def call(*words, **changes):
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "RECIPE": str(folder / "recipe.py"),
            "CONFIG": str(CONFIGS / "fsdp.yaml"),
            "LAUNCHER": shlex.quote(str(folder / "launcher")),
            "OUTPUT_DIR": str(tmp_path / "run"),
            "MEETING": f"127.0.0.1:{free_port()}",
            "HOSTS": "1:2",
            "GPUS": "2",
            "BATCH": "2",
            "ROWS_PER_STEP": "8",
            "WORDS": str(tmp_path / "words"),
        }
        command = [str(REPO / "clusters" / "torchrun_elastic.sh"), *words]
        done = subprocess.run(
            command, env=environment | changes, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    return call


# ---- Refused in one line ----
WRONG = {
    "RECIPE": ["missing.py", "recipes/llama_pipeline.py"],
    "CONFIG": ["missing.yaml", "accelerate_configs/single.yaml", "accelerate_configs/tp.yaml"],
    "MEETING": ["", "host1", "host1:x", "host1:65536", "no-such-host.invalid:1"],
    "HOSTS": ["", "0:2", "1:08", "1:2:3", "9" * 20, "4:1"],
    "ROWS_PER_STEP": ["", "08", "12"],
    "BATCH": ["two"],
    "GPUS": ["0", "abc", "08", "-1", "RANDOM", "9" * 20],
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
    ("word", "variable"),
    [
        ("--output_dir=4", "OUTPUT_DIR"),
        ("--per-device-train-batch-size=4", "BATCH"),
        ("--gradient_accumulation_steps 4", "ROWS_PER_STEP"),
    ],
)
def test_a_flag_that_a_variable_decides_is_refused(word, variable, call):
    code, told = call("--seed", "1", *word.split())
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
