# SPDX-License-Identifier: Apache-2.0
"""The call of accelerate's launcher is found and read, in every form that it takes."""

import pytest

from components import launch_command

PYTHON = "/env/bin/python"
BIN = "/env/bin/accelerate"
COMMANDS = {
    "accelerate launch": [PYTHON, BIN, "launch"],
    "accelerate-launch": [PYTHON, f"{BIN}-launch"],
    "the module": [PYTHON, "-u", "-m", "accelerate.commands.launch"],
    "the file of the module": [PYTHON, "/lib/accelerate/commands/launch.py"],
    "the module of all commands": [PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_launchers_own_arguments_are_found(command):
    own = ["--config_file", "a.yaml", "train.py", "--max_steps", "2"]
    assert launch_command.arguments_in([*command, *own]) == own


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        [PYTHON, "train.py"],
        [PYTHON, BIN, "config"],
        ["sh", "-c", "accelerate launch train.py"],
        [PYTHON, "-m", "torch.distributed.run", "train.py"],
        [],
    ],
    ids=str,
)
def test_what_is_no_launcher_has_none(command):
    assert launch_command.arguments_in(command) is None


def test_the_file_is_named_in_every_way_that_the_launcher_takes(tmp_path):
    for words in (
        ["--config_file", "a.yaml"],
        ["--config_file=a.yaml"],
        ["--config-file", "a.yaml"],
        ["--num_processes", "2", "--multi_gpu", "--config-file=a.yaml", "-m"],
    ):
        found = launch_command.read_command(
            [*words, "train.py", "--config_file", "b.yaml"], str(tmp_path)
        )
        assert found.config_file == tmp_path / "a.yaml" and "training_script" in found.given


def test_without_a_name_it_is_the_default_file_unless_a_cpu_is_asked_for(tmp_path, monkeypatch):
    default = tmp_path / "default_config.yaml"
    monkeypatch.setattr(launch_command, "default_config_file", str(default))
    assert launch_command.read_command(["train.py"], str(tmp_path)).config_file is None
    default.touch()
    assert launch_command.read_command(["train.py"], str(tmp_path)).config_file == default
    assert launch_command.read_command(["--cpu", "train.py"], str(tmp_path)).config_file is None
