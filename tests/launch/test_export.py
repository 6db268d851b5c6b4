# SPDX-License-Identifier: Apache-2.0
"""scripts/export.py makes folders for llama.cpp, Ollama and vLLM of what the recipes train."""

import json
import shutil
import sys
from functools import partial

import pytest

from launching import REPO, data_of, read_json, recipe, run

STEPS = ("--max_steps", "2", "--learning_rate", "2e-2", "--logging_steps", "1")

FEW = ("--num_prompts", "8", "--max_new_tokens", "4")


def export(*arguments, **options):
    return run(sys.executable, REPO / "scripts" / "export.py", *arguments, **options)


def train(tiny, flags, folder):
    done = recipe(*data_of(tiny), *STEPS, *flags, "--output_dir", folder)
    assert done.returncode == 0, done.output[-3000:]


@pytest.fixture(scope="module")
def trained(tiny, once):
    return once("export_trained", partial(train, tiny, ()))


@pytest.fixture(scope="module")
def adapters(tiny, once):
    return once("export_adapters", partial(train, tiny, ("--use_peft",)))


def refused(done, code, words):
    """Check that a command ended with one line that has these words."""
    assert done.returncode == code, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.output
    assert words in lines[0]


def test_a_trained_folder_becomes_a_gguf_with_its_receipt(trained, tmp_path):
    done = export(trained, tmp_path / "out", "--to", "gguf")
    assert done.returncode == 0, done.output
    receipt = read_json(tmp_path / "out" / "receipt.json")
    assert receipt["passed"] and receipt["outtype"] == "f32"
    assert receipt["tensors"]["equal"] == receipt["tensors"]["in_the_gguf"] > 20
    assert receipt["tensors"]["not_compared"] == []
    assert set(receipt["files"]) == {"model.gguf"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.gguf",
        "receipt.json",
    ]
    assert not (tmp_path / "out.unfinished").exists()


def test_a_trained_folder_becomes_a_model_of_ollama(trained, tmp_path):
    done = export(trained, tmp_path / "out", "--to", "ollama", "--outtype", "q8_0")
    assert done.returncode == 0, done.output
    receipt = read_json(tmp_path / "out" / "receipt.json")
    assert receipt["modelfile"] == {"prompts": 50, "same": 50, "different": []}
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./model.gguf"
    assert 'PARAMETER stop "<|end_of_turn|>"' in lines
    assert "ollama create out -f" in done.output


@pytest.fixture
def base_without_the_end(tiny, tmp_path):
    """The tiny model, whose generation config lists only the end of a text, and its rows."""
    shutil.copytree(tiny, tmp_path / "tiny")
    path = tmp_path / "tiny" / "model" / "generation_config.json"
    path.write_text(json.dumps(read_json(path) | {"eos_token_id": 2}))
    return tmp_path / "tiny"


def test_a_trained_folder_lists_the_end_of_turn_that_its_base_lacked(
    base_without_the_end, tmp_path
):
    done = recipe(*data_of(base_without_the_end), *STEPS, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.output[-3000:]
    assert read_json(tmp_path / "run" / "generation_config.json")["eos_token_id"] == [2, 3]
    lines = [line for line in done.output.splitlines() if line.startswith("generation_config.json")]
    assert len(lines) == 1 and lines[0].endswith("[2, 3] (<|end_of_text|>, <|end_of_turn|>)"), (
        done.output
    )


def test_adapters_on_such_a_base_get_the_end_of_turn_when_they_are_exported(
    base_without_the_end, tmp_path
):
    train(base_without_the_end, ("--use_peft",), tmp_path / "run")
    assert not (tmp_path / "run" / "generation_config.json").exists()
    done = export(tmp_path / "run", tmp_path / "out", "--to", "vllm")
    assert done.returncode == 0, done.output
    assert read_json(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [2, 3]


@pytest.mark.parametrize("kind", ["trained", "adapters"])
def test_both_kinds_of_folders_become_ones_for_vllm(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    done = export(folder, tmp_path / "out", "--to", "vllm")
    assert done.returncode == 0, done.output
    receipt = read_json(tmp_path / "out" / "receipt.json")
    assert receipt["passed"] and receipt["command"] == done.output.splitlines()[-1]
    assert receipt["command"].startswith("vllm serve ")


@pytest.fixture(scope="module")
def trained_mixture(tiny_of, once):
    def fill(folder):
        script = REPO / "recipes" / "mixtral.py"
        words = [*data_of(tiny_of("mixtral")), *STEPS, "--output_dir", folder]
        done = run(sys.executable, script, *words)
        assert done.returncode == 0, done.output[-3000:]

    return once("export_mixture", fill)


def test_every_tensor_of_a_trained_mixture_is_compared(trained_mixture, tmp_path):
    done = export(trained_mixture, tmp_path / "out", "--to", "gguf", *FEW)
    assert done.returncode == 0, done.output
    tensors = read_json(tmp_path / "out" / "receipt.json")["tensors"]
    assert tensors["not_compared"] == []
    assert tensors["equal"] == tensors["in_the_gguf"] > 20


@pytest.mark.parametrize("target", ["gguf", "ollama", "vllm"])
@pytest.mark.parametrize(
    "config", ["ddp", "fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero2", "deepspeed_zero3"]
)
def test_what_ranks_trained_under_a_yaml_is_exported(config, target, short_under, tmp_path):
    done = export(short_under(config, "full"), tmp_path / "out", "--to", target, *FEW)
    assert done.returncode == 0, done.output
    receipt = read_json(tmp_path / "out" / "receipt.json")
    assert receipt["passed"]
    if target == "vllm":
        (reloaded,) = receipt["comparisons"]
        assert reloaded["same_greedy_tokens"] == reloaded["prompts"] == 8
    else:
        assert receipt["tensors"]["equal"] == receipt["tensors"]["in_the_gguf"] > 20


def test_adapters_have_to_be_merged_for_llama_cpp(adapters, tmp_path):
    done = export(adapters, tmp_path / "out", "--to", "gguf")
    refused(done, 64, "python scripts/merge.py")


def test_a_template_that_ollama_cannot_write_is_refused_before_anything_is_written(
    trained, tmp_path
):
    shutil.copytree(trained, tmp_path / "run")
    template = tmp_path / "run" / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("message['content']", "message['content']|upper")
    )
    done = export(tmp_path / "run", tmp_path / "out", "--to", "ollama")
    refused(done, 65, "--to gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    path.write_text(json.dumps(content))
    refused(export(tmp_path / "run", tmp_path / "out", "--to", "gguf"), 65, "cuts words")


def test_nothing_is_overwritten(trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    refused(export(trained, tmp_path / "mine", "--to", "gguf"), 73, "exists")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--to", "vllm", "--outtype", "f16"), "--outtype is for gguf"),
        (("--to", "gguf", "--num_prompts", "0"), "--num_prompts"),
        (("--to", "gguf", "--bound", "nan"), "--bound"),
    ],
)
def test_a_wrong_flag_is_refused(flags, words, trained, tmp_path):
    refused(export(trained, tmp_path / "out", *flags), 64, words)


def test_a_folder_without_a_model_is_refused(tmp_path):
    refused(export(tmp_path, tmp_path / "out", "--to", "gguf"), 64, "no config.json")
