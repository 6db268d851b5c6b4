# SPDX-License-Identifier: Apache-2.0
"""scripts/export.py makes what llama.cpp and Ollama read of what the recipes train."""

import shutil
from functools import partial

import pytest

from launching import data_of, edit_json, errors_of, read_json, recipe, script

STEPS = ("--max_steps", "2", "--learning_rate", "2e-2", "--logging_steps", "1")
FEW = ("--num_prompts", "8")
OWN_WORDS = ("--pre_tokenizer", "smollm")  # whose rules the tiny tokenizer has


def export(*arguments, code):
    return script("export", *arguments, *FEW, code=code)


def train(tiny, flags, folder):
    return recipe(*data_of(tiny), *STEPS, *flags, "--output_dir", folder, code=0)


@pytest.fixture(scope="module")
def trained(tiny, once):
    return once("export_trained", partial(train, tiny, ()))


@pytest.fixture(scope="module")
def base_without_the_end(tiny, tmp_path_factory):
    """The tiny model, whose generation config lists only the end of a text, and its rows."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("base") / "tiny")
    edit_json(folder / "model" / "generation_config.json", eos_token_id=2)
    return folder


@pytest.fixture(scope="module")
def adapters(base_without_the_end, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "run"
    train(base_without_the_end, ("--use_peft", "--lora_r", "12"), folder)
    return folder


def refused(word, code, *arguments):
    """Check that a command ends with one line that has this word."""
    (line,) = errors_of(export(*arguments, code=code))
    assert word in line


def test_a_trained_folder_becomes_a_model_of_llama_cpp_and_of_ollama(trained, tmp_path):
    export(trained, tmp_path / "out", "--to", "gguf", *OWN_WORDS, code=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    words = ["--to", "ollama", "--outtype", "q8_0", *OWN_WORDS]
    done = export(trained, tmp_path / "mine", *words, code=0)
    lines = (tmp_path / "mine" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./model.gguf"
    assert 'PARAMETER stop "<|end_of_turn|>"' in lines
    assert "ollama create mine -f" in done.output


def test_a_trained_folder_lists_the_end_of_turn_that_its_base_lacked(
    base_without_the_end, tmp_path
):
    done = train(base_without_the_end, (), tmp_path / "run")
    assert read_json(tmp_path / "run" / "generation_config.json")["eos_token_id"] == [2, 3]
    lines = [line for line in done.output.splitlines() if line.startswith("generation_config.json")]
    assert len(lines) == 1, done.output


def test_what_cannot_be_exported_is_one_line(adapters, trained, tmp_path):
    output = tmp_path / "out"
    refused("python scripts/merge.py", 64, adapters, output, "--to", "gguf")
    refused("--pre_tokenizer", 65, trained, output, "--to", "gguf")
    refused("exists", 73, trained, trained, "--to", "gguf")
    run_folder = shutil.copytree(trained, tmp_path / "run")
    template = run_folder / "chat_template.jinja"
    text = template.read_text().replace("message['content']", "message['content']|upper")
    template.write_text(text)
    other = tmp_path / "other"
    refused("--to gguf", 65, run_folder, other, "--to", "ollama")
    assert not other.exists() and not other.with_suffix(".unfinished").exists()
