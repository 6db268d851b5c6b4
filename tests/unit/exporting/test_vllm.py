# SPDX-License-Identifier: Apache-2.0
"""Folders for vLLM: their files, their command lines, and the faults that their receipts catch."""

import argparse
import json
import shlex
import shutil

import pytest
from safetensors.torch import load_file, save_file

from adapter_folders import write_adapters
from exporting import vllm
from exporting.origin import read_config, read_origin
from file_limits import largest_file
from generation.loading import find_model
from merging import checking
from merging.receipt import hash_files

FEW = argparse.Namespace(prompts=None, num_prompts=20, max_new_tokens=4, device="cpu")


@pytest.fixture
def export(capsys):
    """A function from a folder and an output to (exit code, what was printed)."""

    def call(folder, output, bound=None):
        try:
            source = find_model(str(folder))
            tokenizer = checking.load_tokenizer(source.tokenizer)
            vllm.check(source, read_config(source), tokenizer)
            vllm.export(read_origin(source, FEW), output, bound)
            code = 0
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture
def whole(base, tmp_path):
    """A copy of a whole model, whose generation config lists only the end of a text."""
    folder = tmp_path / "whole"
    shutil.copytree(base / "model", folder)
    write_ends(folder, [2])
    return folder


@pytest.fixture
def adapters(whole, base, tmp_path):
    """Adapters on the copy."""
    folder = write_adapters(tmp_path / "adapters", base, {"model_name_or_path": str(whole)})
    change_json(folder / "adapter_config.json", base_model_name_or_path=str(whole))
    return folder


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_ends(folder, tokens):
    change_json(folder / "generation_config.json", eos_token_id=tokens)


def read_json(path):
    return json.loads(path.read_text())


def words_of(printed):
    """The words of the command line that was printed last."""
    return shlex.split(printed.splitlines()[-1])


def value_of(words, flag):
    return words[words.index(flag) + 1]


# ---- What is written ----
def test_a_whole_model_is_copied_with_the_end_of_a_turn(whole, export, tmp_path):
    before = hash_files(whole)
    output = tmp_path / "served"
    code, printed = export(whole, output)
    assert code == 0, printed
    assert hash_files(whole) == before
    assert read_json(output / "generation_config.json")["eos_token_id"] == [2, 3]
    copied = hash_files(output)
    for name in before.keys() - {"generation_config.json"}:
        assert copied[name] == before[name]
    receipt = read_json(output / "receipt.json")
    (row,) = receipt["comparisons"]
    assert receipt["passed"] and receipt["format"] == "vllm" and "0.33.0" in receipt["rules_of"]
    assert row["same_greedy_tokens"] == row["same_rendered_prompts"] == row["prompts"] == 20
    assert receipt["files"] == copied


def test_a_whole_model_is_served_as_it_was_trained(whole, export, tmp_path):
    _, printed = export(whole, tmp_path / "served")
    words = words_of(printed)
    assert words[:3] == ["vllm", "serve", str(tmp_path / "served")]
    assert value_of(words, "--served-model-name") == "served"
    assert value_of(words, "--dtype") == "float32"  # vLLM would take bfloat16
    assert value_of(words, "--max-model-len") == "128"
    assert shlex.join(words) == read_json(tmp_path / "served" / "receipt.json")["command"]


def test_adapters_take_their_tokenizer_and_their_ends_with_them(adapters, whole, export, tmp_path):
    before = hash_files(adapters)
    output = tmp_path / "served"
    code, printed = export(adapters, output)
    assert code == 0, printed
    assert hash_files(adapters) == before
    assert read_json(output / "generation_config.json")["eos_token_id"] == [2, 3]
    assert read_json(output / "adapter_config.json")["base_model_name_or_path"] == str(whole)
    words = words_of(printed)
    assert words[:4] == ["vllm", "serve", str(whole), "--enable-lora"]
    assert value_of(words, "--lora-modules") == f"served={output}"
    assert value_of(words, "--max-lora-rank") == "8"  # Next to their rank, 4
    for flag in ("--tokenizer", "--generation-config"):
        assert value_of(words, flag) == str(output)
    assert value_of(words, "--chat-template") == str(output / "chat_template.jinja")
    assert value_of(words, "--dtype") == "bfloat16"  # its kernels of adapters take no float32
    assert "16 bits: merge them to serve float32" in printed


def test_variables_of_the_template_and_a_limit_of_the_tokenizer_are_named(
    adapters, export, tmp_path
):
    run = read_json(adapters / "run.json")
    run["arguments"]["chat_template_kwargs"] = {"enable_thinking": False}
    (adapters / "run.json").write_text(json.dumps(run))
    change_json(adapters / "tokenizer_config.json", model_max_length=100)
    code, printed = export(adapters, tmp_path / "served")
    assert code == 0, printed
    words = words_of(printed)
    assert json.loads(value_of(words, "--default-chat-template-kwargs")) == {
        "enable_thinking": False
    }
    assert value_of(words, "--max-model-len") == "100"


def test_adapters_of_a_quantized_base_are_measured_on_the_base_itself(base, export, tmp_path):
    folder = write_adapters(tmp_path / "run", base, {"load_in_4bit": True})
    code, printed = export(folder, tmp_path / "served")
    assert code == 0, printed
    (row,) = read_json(tmp_path / "served" / "receipt.json")["comparisons"]
    assert row["largest_logit_gap"] > 1e-3  # What quantization changed
    assert "vLLM serves the base as it is: scripts/merge.py compares both" in printed
    assert export(folder, tmp_path / "strict", 1e-4)[0] == 76


def test_what_samples_and_several_ranks_are_noted(adapters, base, export, tmp_path):
    change_json(tmp_path / "whole" / "generation_config.json", repetition_penalty=1.1)
    _, printed = export(adapters, tmp_path / "served")
    assert "repetition_penalty=1.1" in printed
    folder = write_adapters(tmp_path / "run", base, rank_pattern={"q_proj": 7})
    code, printed = export(folder, tmp_path / "several")
    assert code == 0 and "earlier versions ignored them" in printed
    assert value_of(words_of(printed), "--max-lora-rank") == "8"


# ---- What is refused ----
def test_what_vllm_refuses_ends_in_one_line_with_the_cure(base, export, tmp_path):
    folder = write_adapters(tmp_path / "run", base, use_dora=True, modules_to_save=["lm_head"])
    code, printed = export(folder, tmp_path / "served")
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert code == 65 and "modules_to_save has lm_head; they are DoRA; merge them" in line
    assert f"python scripts/merge.py {folder} {folder}-merged" in line
    assert not list(tmp_path.glob("served*"))


def test_an_output_that_exists_is_kept(whole, export, tmp_path):
    code, printed = export(whole, whole)
    assert code == 73 and "exists" in printed


@pytest.mark.parametrize("trained", ["whole", "adapters"])
def test_a_full_disk_is_one_line(trained, request, export, tmp_path):
    folder = request.getfixturevalue(trained)
    with largest_file(4_000):
        code, printed = export(folder, tmp_path / "served")
    assert code == 73 and f"cannot write {tmp_path}/served.unfinished" in printed
    assert not (tmp_path / "served").exists()


def test_a_base_whose_weights_changed_is_refused(adapters, whole, export, tmp_path):
    path = sorted(whole.glob("*.safetensors"))[0]
    tensors = {name: weight * 1.01 for name, weight in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    code, printed = export(adapters, tmp_path / "served")
    assert code == 65 and "are not those that the adapters were trained on" in printed


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "BASE"}', "not the configuration"),
        ("adapter_model.safetensors", "damaged", "cannot be read"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
    ],
)
def test_adapters_that_cannot_be_read_are_refused(
    name, text, says, adapters, whole, export, tmp_path
):
    path = adapters / name
    path.unlink()
    if text is not None:
        path.write_text(text.replace("BASE", str(whole)))
    code, printed = export(adapters, tmp_path / "served")
    assert code == 65 and says in printed


def test_a_whole_model_with_a_missing_file_is_refused(whole, export, tmp_path):
    sorted(whole.glob("*.safetensors"))[0].unlink()
    code, printed = export(whole, tmp_path / "served")
    assert code == 65 and not (tmp_path / "served").exists(), printed


# ---- Faults ----
def scale_a_weight(folder):
    """Change the weights by a tenth."""
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = {name: weight * 1.1 for name, weight in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def change_the_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("bos_token", "''"))


FAULTS = {
    "other weights": (scale_a_weight, "a logit differs by"),
    "another template": (change_the_template, "the template writes prompt 1 as"),
    "no end of turn": (lambda folder: write_ends(folder, [2]), "the end tokens [3] are missing"),
}


@pytest.mark.parametrize("kind", ["whole", "adapters"])
@pytest.mark.parametrize(("fault", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_what_was_written_ends_with_76(
    fault, says, kind, request, export, monkeypatch, tmp_path
):
    name = {"whole": "write_model", "adapters": "write_adapters"}[kind]
    write = getattr(vllm, name)

    def write_with_fault(*arguments):
        write(*arguments)
        fault(tmp_path / "served.unfinished")

    monkeypatch.setattr(vllm, name, write_with_fault)
    code, printed = export(request.getfixturevalue(kind), tmp_path / "served")
    assert code == 76 and says in printed, printed
    assert not (tmp_path / "served").exists()


def test_a_tensor_that_was_lost_ends_with_76(tied, export, monkeypatch, tmp_path):
    copy = shutil.copyfile

    def copy_without_norm(source, target):
        if target.suffix != ".safetensors":
            return copy(source, target)
        kept = {name: w for name, w in load_file(source).items() if name != "model.norm.weight"}
        return save_file(kept, target, {"format": "pt"})

    monkeypatch.setattr(vllm.shutil, "copyfile", copy_without_norm)
    code, printed = export(tied / "model", tmp_path / "served")
    assert code == 76 and "the folder lacks model.norm.weight" in printed, printed
