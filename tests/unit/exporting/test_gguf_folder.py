# SPDX-License-Identifier: Apache-2.0
"""The folder with a GGUF: the command that runs it."""

import shlex
from pathlib import Path

import pytest

from exporting.gguf_folder import Wishes, command_of


@pytest.mark.parametrize(
    ("folder", "name"),
    [("exports/mine", "mine"), ("exports/My Model", "my-model"), ("exports/_", "_")],
)
def test_the_command_can_be_pasted_and_names_a_model_as_ollama_allows(folder, name):
    words = shlex.split(command_of(Wishes("auto", for_ollama=True, bound=None), Path(folder)))
    assert words == ["ollama", "create", name, "-f", f"{folder}/Modelfile"]
    words = shlex.split(command_of(Wishes("auto", for_ollama=False, bound=None), Path(folder)))
    assert words == ["llama-server", "-m", f"{folder}/model.gguf", "--jinja"]
