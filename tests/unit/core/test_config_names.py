# SPDX-License-Identifier: Apache-2.0
"""The file of accelerate's launcher is found in every form of its call, and its keys by name."""

import pytest

from broken_configs import FSDP2
from core import config_names

PYTHON = "/env/bin/python"
BIN = "/env/bin/accelerate"
LAUNCHERS = [
    [PYTHON, BIN, "launch"],
    [PYTHON, f"{BIN}-launch"],
    [PYTHON, "-u", "-m", "accelerate.commands.launch"],
    [PYTHON, "/lib/accelerate/commands/launch.py"],
    [PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"],
]


@pytest.mark.parametrize("command", LAUNCHERS, ids=" ".join)
def test_the_launchers_own_arguments_are_found(command):
    own = ["--config_file", "a.yaml", "train.py", "--max_steps", "2"]
    assert config_names.arguments_of_launcher([*command, *own]) == own


def test_the_file_is_the_launchers_own_or_the_default_one(tmp_path, monkeypatch):
    default = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_names, "default_config_file", str(default))
    for words, file in (
        (["--config-file", "a.yaml", "train.py", "--config_file", "b.yaml"], tmp_path / "a.yaml"),
        (["train.py"], None),
    ):
        found = config_names.read_command(words, str(tmp_path)).config_file
        assert found == (str(file) if file else None)
    default.touch()
    assert config_names.read_command(["train.py"], str(tmp_path)).config_file == str(default)
    assert config_names.read_command(["--cpu", "train.py"], str(tmp_path)).config_file is None


def test_a_misspelt_key_is_named_with_its_line_and_the_key_that_is_meant(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(FSDP2 + "  offload_params: true\n  fsdp_reshard_after_foward: false\n")
    [line] = map(str, config_names.find_unknown_keys(str(file)))
    assert line.startswith(f"{file}:8: fsdp_config.fsdp_reshard_after_foward: ")
    assert line.endswith("fix: fsdp_reshard_after_forward")
