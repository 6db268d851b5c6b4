# SPDX-License-Identifier: Apache-2.0
"""What the commands of clusters/trainjob.yaml and clusters/skypilot.yaml refuse.

echo stands in for the launcher. tests/cluster validates the files, and trains with their commands.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

CLUSTERS = Path(__file__).resolve().parents[2] / "clusters"


def read(name):
    return yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())


def pod_command(words):
    """The command of the container of trainjob.yaml, and what the operator sets."""
    trainer = read("trainjob")["spec"]["trainer"]
    script, name, *_ = trainer["args"]
    ranks = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    variables = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29400"} | ranks
    return [*trainer["command"], script, name, *words], variables


def machine_command(words):
    """The command of skypilot.yaml, and what SkyPilot sets."""
    ranks = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_RANK": "0",
    }
    variables = {"SKYPILOT_NODE_IPS": "127.0.0.1", "WORDS": shlex.join(words)}
    return ["bash", "-c", read("skypilot")["run"]], variables | ranks


COMMANDS = {"trainjob": pod_command, "skypilot": machine_command}


def run(kind, output_dir, *words):
    """Run the command of a file; in place of the ranks, echo shows the words for them."""
    command, variables = COMMANDS[kind](words)
    variables |= {"RECIPE": "recipe.py", "CONFIG": "my.yaml", "LAUNCHER": "echo"}
    environment = os.environ | variables | {"OUTPUT_DIR": str(output_dir)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_ranks_get_the_folder_and_the_words(kind, tmp_path):
    words = ("--run_name", "output-dir and more", "--output_directory=x")
    done = run(kind, tmp_path / "run", *words)
    expected = f"recipe.py --output_dir {tmp_path}/run --run_name output-dir and more"
    assert done.stdout.endswith(f" --tee 3 {expected} --output_directory=x\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("words", [["--output_dir", "elsewhere"], ["--output-dir=elsewhere"]])
def test_the_folder_of_the_run_is_named_by_its_variable_only(kind, words, tmp_path):
    done = run(kind, tmp_path / "run", "--seed", "1", *words)
    assert "OUTPUT_DIR" in done.stderr and done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (64, "")
