# SPDX-License-Identifier: Apache-2.0
"""Faults that merge.py finds: planted in its input, in its own code, and in the merged folder."""

import shutil
from dataclasses import dataclass, field

import pytest
import torch

from adapter_folders import make_base, write_adapters
from merged_folders import edit_json, edit_tensors, read_receipt
from merging import deltas, writing
from merging.plan import Plan

QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
NOT_PEFTS = "a merged tensor is not what peft makes of the base and its adapter"


# ---- In the input: of the adapters and of a copy of their base ----
def train_the_base_again(adapters, base):
    for path in (base / "model").glob("*.safetensors"):
        edit_tensors(path, lambda tensors: [weight.add_(0.01) for weight in tensors.values()])


def second_shard(base):
    return sorted((base / "model").glob("*.safetensors"))[1]


def truncate_shard(adapters, base):
    path = second_shard(base)
    path.write_bytes(path.read_bytes()[:-10])


def remove_shard(adapters, base):
    second_shard(base).unlink()


def change_rank(adapters, base):
    edit_json(adapters / "adapter_config.json", r=8)


def add_a_word(adapters, base):
    def widen(tensors):
        for name in tensors:
            if "lora" not in name:
                tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    edit_tensors(adapters / "adapter_model.safetensors", widen)


# ---- In the code ----
def change_parts(monkeypatch, factor_of):
    """Multiply what the adapter of each target adds by a factor."""
    parts = Plan.parts

    def changed(self, target, read):
        found = parts(self, target, read)
        return {name: factor_of(target) * delta for name, delta in found.items()}

    monkeypatch.setattr(Plan, "parts", changed)


def forget_a_layer(monkeypatch):
    change_parts(monkeypatch, lambda target: 0 if "layers.1" in target.parameter else 1)


def add_a_layer_twice(monkeypatch):
    change_parts(monkeypatch, lambda target: 2 if "layers.1" in target.parameter else 1)


def ignore_alpha(monkeypatch):
    change_parts(monkeypatch, lambda target: 1 / target.scaling)


def scale_as_lora(monkeypatch):
    rank = 4
    change_parts(monkeypatch, lambda target: rank**-0.5)


def keep_the_length(monkeypatch):
    monkeypatch.setattr(
        deltas, "add_with_magnitude", lambda weight, delta, *_: deltas.add(weight, delta)
    )


def use_the_other_base(monkeypatch):
    write = writing.write_weights

    def swapped(folder, adapter, plan, files, use_quantized, dtype):
        write(folder, adapter, plan, files, not use_quantized, dtype)

    monkeypatch.setattr(writing, "write_weights", swapped)


# ---- In the merged folder ----
def change_template(folder, base):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("{{ '<|assistant|>' }}", "{{ '<|assistant|> ' }}"))


def drop_end_token(folder, base):
    edit_json(folder / "generation_config.json", eos_token_id=2)


def change_weights(folder, change):
    edit_tensors(folder / "model.safetensors", change)


def write_head_twice(folder, base):
    def double(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()

    change_weights(folder, double)


def put_base_weights(folder, base):
    shutil.copyfile(base / "model" / "model.safetensors", folder / "model.safetensors")


def drop_tensor(folder, base):
    change_weights(folder, lambda tensors: tensors.pop(QUERY))


def write_nan(folder, base):
    change_weights(folder, lambda tensors: tensors[QUERY][0, 0].fill_(float("nan")))


def cut_weights(folder, base):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def leave_adapters(folder, base):
    write_adapters(folder.parent / "left", base)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder.parent / "left" / name, folder / name)


def rename_a_token(folder, base):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|user|>"', '"<|USER|>"'))


def take_another_tokenizer(folder, base):
    other = make_base(folder.parent / "other", "mistral_pretrain")
    shutil.copyfile(other / "model" / "tokenizer.json", folder / "tokenizer.json")


def widen_the_vocabulary(folder, base):
    def widen(tensors):
        tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], tensors[EMBEDDING][:1]])
        edit_json(folder / "config.json", vocab_size=len(tensors[EMBEDDING]))

    change_weights(folder, widen)


def name_a_missing_file(folder, base):
    writing.write_json(
        folder / "model.safetensors.index.json",
        {"weight_map": {QUERY: "model-00002-of-00002.safetensors"}},
    )


@dataclass(frozen=True)
class Fault:
    """A fault, and how merge.py ends.

    Attributes:
        plant: a function whose arguments are those of the section above that it is in.
        says: a part of the one line on stderr.
        options: of the adapters, for a fault that only some kinds of them can have.
        arguments: of their run.
    """

    plant: object
    code: int
    says: str
    options: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)


WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}
QLORA = {"load_in_4bit": True}
IN_INPUT = [
    Fault(train_the_base_again, 65, "are not those that the adapters were trained on"),
    Fault(truncate_shard, 65, "incomplete or damaged"),
    Fault(remove_shard, 65, "which its model.safetensors.index.json names"),
    Fault(change_rank, 65, "another rank, or another base"),
    Fault(add_a_word, 65, "another rank, or another base", WHOLE),
    Fault(take_another_tokenizer, 65, "the tokenizer makes the token"),
]
IN_CODE = [
    Fault(forget_a_layer, 76, f"{NOT_PEFTS}: model.layers.1"),
    Fault(forget_a_layer, 76, f"{NOT_PEFTS}: model.layers.1", {}, QLORA),
    Fault(add_a_layer_twice, 76, f"{NOT_PEFTS}: model.layers.1"),
    Fault(ignore_alpha, 76, f"{NOT_PEFTS}: model.layers.0"),
    Fault(scale_as_lora, 76, f"{NOT_PEFTS}: model.layers.0", {"use_rslora": True}),
    Fault(keep_the_length, 76, f"{NOT_PEFTS}: model.layers.0", {"use_dora": True}),
    Fault(use_the_other_base, 76, "a merged tensor without an adapter is not", {}, QLORA),
]
IN_FOLDER = [
    Fault(change_template, 76, "the template writes prompt 1 as"),
    Fault(drop_end_token, 76, "the end tokens [3] are missing"),
    Fault(write_head_twice, 76, f"lm_head.weight is written although it is tied to {EMBEDDING}"),
    Fault(put_base_weights, 76, f"{NOT_PEFTS}: model.layers.0"),
    Fault(drop_tensor, 76, f"the merged files lack {QUERY}"),
    Fault(write_nan, 76, f"not numbers, or infinite: {QUERY}"),
    Fault(cut_weights, 65, "model.safetensors: incomplete or damaged"),
    Fault(leave_adapters, 76, "adapter_config.json is in it"),
    Fault(rename_a_token, 76, "the tokenizer makes other tokens"),
    Fault(take_another_tokenizer, 76, "the tokenizer makes the token"),
    Fault(widen_the_vocabulary, 76, f"without an adapter is not the base's: {EMBEDDING}"),
    Fault(name_a_missing_file, 65, "lacks model-00002-of-00002.safetensors, which its"),
]


def name_of(fault):
    kind = "-".join([*fault.options, *fault.arguments])
    return fault.plant.__name__ + (f"-{kind}" if kind else "")


@pytest.fixture
def plant_and_run(base, tied, merged, copy, merge, monkeypatch, tmp_path):
    """A function from a fault to the exit code and what was printed."""

    def call(fault):
        if fault in IN_FOLDER:
            fault.plant(copy, tied)
            return merge(merged / "adapters", copy, "--check")
        own = tmp_path / "base"
        shutil.copytree(base, own)
        adapters = write_adapters(tmp_path / "adapters", own, fault.arguments, **fault.options)
        if fault in IN_CODE:
            fault.plant(monkeypatch)
        else:
            fault.plant(adapters, own)
        return merge(adapters, tmp_path / "merged")

    return call


@pytest.mark.parametrize("fault", [*IN_INPUT, *IN_CODE, *IN_FOLDER], ids=name_of)
def test_a_planted_fault_is_found(fault, plant_and_run, copy, tmp_path):
    """Each fault ends with its exit code and one line that names it, and nothing looks finished.

    With 65, before anything is written: another base of the same shape, a truncated file, a file
    that only the index has, adapters of another rank than their configuration says, or of a
    vocabulary that was resized.
    With 76, after a wrong merge: a layer that is forgotten or added twice, alpha that is ignored,
    rsLoRA with the scale of LoRA, DoRA without its magnitudes, the other one of two bases.
    With 76, of a folder that was changed: another template, a missing end token, a tied head that
    is written twice, weights of the base, a missing tensor, one with a NaN, adapters beside the
    weights, a renamed token, the tokenizer of another model, a wider vocabulary.
    With 65, of a folder that cannot be loaded: a truncated file, a file that only the index has.
    """
    code, printed = plant_and_run(fault)
    assert code == fault.code, printed
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and fault.says in lines[0], printed
    assert not (tmp_path / "merged").exists() and not (copy / "receipt.json").exists()
    left = tmp_path / "merged.unfinished"
    if fault in IN_CODE:
        receipt = read_receipt(left)
        assert receipt["passed"] is False and writing.is_left_behind(left)
        # Adapters that change much are seen in the logits as well
        assert any("reloaded: a logit differs by" in problem for problem in receipt["problems"])
    else:
        assert not left.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", [forget_a_layer, add_a_layer_twice])
def test_a_wrong_layer_is_found_although_its_adapter_is_mild(
    plant, dtype, base, merge, monkeypatch, tmp_path
):
    adapters = write_adapters(tmp_path / "adapters", base, scale=2e-3)
    code, printed = merge(adapters, tmp_path / "good", "--dtype", dtype)
    assert code == 0, printed
    plant(monkeypatch)
    code, printed = merge(adapters, tmp_path / "merged", "--dtype", dtype)
    assert code == 76, printed
    problems = read_receipt(tmp_path / "merged.unfinished")["problems"]
    assert problems[0] == f"{NOT_PEFTS}: {QUERY}, {QUERY.replace('q_proj', 'v_proj')}"
    if dtype == "bfloat16":  # Rounding covers what the adapters do
        assert len(problems) == 1
    shutil.move(tmp_path / "merged.unfinished", tmp_path / "merged")
    code, printed = merge(adapters, tmp_path / "merged", "--check")
    assert code == 76 and NOT_PEFTS in printed, printed
