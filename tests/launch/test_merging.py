# SPDX-License-Identifier: Apache-2.0
"""merge.py writes what peft merges, bit for bit, and finds faults planted before and after that."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig

import merge as command
from adapter_folders import EXPERTS, make_base, write_adapters
from generation import merging
from launching import data_of, edit_json, rehearse, script, tensors_of

FEW = ("--num_prompts", "3", "--device", "cpu")
HEAD = "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
IN_4_BITS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
}
BASES = {
    "llama": ("llama",),
    "tied": ("llama", "--tie_word_embeddings"),
    "mixtral": ("mixtral",),
}


@pytest.fixture(scope="module")
def base_of(once):
    """A function from a name of BASES to a folder with that base in several files."""
    return lambda name: once(
        f"merging_{name}", lambda folder: make_base(folder, *BASES[name], shard="100KB")
    )


@pytest.fixture
def merge(in_process):
    """A function from words of a command line to (exit code, what was printed)."""

    def call(*words):
        done = in_process(command, *FEW, *words)
        return done.code, done.out + done.err

    return call


def merge_by_peft(base, adapters):
    """Return the tensors of peft's own merge in fp32, with a head of its own."""
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype="float32")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return PeftModel.from_pretrained(model, adapters).merge_and_unload().state_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"use_rslora": True, "target_modules": "all-linear"}),
        ("llama", {"use_dora": True, "target_modules": "all-linear"}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("mixtral", {"target_parameters": EXPERTS}),
        ("tied", {"target_modules": ["lm_head", "q_proj"]}),
    ],
)
def test_the_tensors_are_those_of_peft_under_the_names_of_the_base(
    name, options, base_of, merge, tmp_path
):
    base = base_of(name)
    adapters = write_adapters(tmp_path / "adapters", base, **options)
    # In 16 bits an untrained router may choose another expert
    words = ["--dtype", "bfloat16", "--bound", "0.2"]
    code, printed = merge(adapters, tmp_path / "merged", *words)
    assert code == 0, printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    for key, weight in merge_by_peft(base, adapters).items():
        assert torch.equal(model.state_dict()[key], weight.to(torch.bfloat16)), key
    before, after = tensors_of(base / "model"), tensors_of(tmp_path / "merged")
    assert after.keys() - before.keys() == ({HEAD} if name == "tied" else set())
    assert not before.keys() - after.keys()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (HEAD not in after)


def test_a_checkpoint_becomes_the_folder_that_its_run_ends_with(tiny, tmp_path):
    out, joined = tmp_path / "run", tmp_path / "joined"
    words = ["--max_steps", 2, "--save_steps", 2, "--eval_strategy", "no", "--output_dir", out]
    rehearse("fsdp2_full_shard", *data_of(tiny), *words, code=0)
    script("merge", out / "checkpoint-2", joined, code=0)
    weights, expected = tensors_of(joined), tensors_of(out)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    others = {path.name for path in out.glob("*.json*")} - {"run.json", "status.json"}
    for name in others - {"metrics.jsonl", "report.json"}:
        assert (joined / name).read_bytes() == (out / name).read_bytes(), name
    AutoModelForCausalLM.from_pretrained(joined)


def test_buffers_in_the_files_of_the_base_are_kept(base_of, merge, tmp_path):
    base = shutil.copytree(base_of("llama"), tmp_path / "base")
    config = Glm4MoeConfig(
        vocab_size=AutoConfig.from_pretrained(base / "model").vocab_size,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.get_buffer(ROUTER_BIAS).uniform_()
    model.save_pretrained(base / "model")
    for path in (base / "model").glob("model-*"):
        path.unlink()
    adapters = write_adapters(tmp_path / "adapters", base)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    merged = tensors_of(tmp_path / "merged")[ROUTER_BIAS]
    assert torch.equal(merged, model.get_buffer(ROUTER_BIAS))


# ---- Faults: of the adapters and their base, and of what was written ----
def edit_tensors(path, change):
    """Call a function with {name: tensor} of a file, and write what it makes of them."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def change_all(path):
    edit_tensors(path, lambda tensors: [weight.mul_(1.01) for weight in tensors.values()])


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def last(base):
    return sorted((base / "model").glob("*.safetensors"))[-1]


def write_head_twice(folder):
    tensors = tensors_of(folder)
    save_file(
        tensors | {HEAD: tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def change_query(folder, change):
    for path in folder.glob("model*.safetensors"):
        if QUERY in load_file(path):
            edit_tensors(path, change)


BEFORE = {
    "another base": lambda adapters, base: change_all(last(base)),
    "a cut file": lambda adapters, base: cut(last(base)),
    "another rank": lambda adapters, base: edit_json(adapters / "adapter_config.json", r=8),
    "a lost adapter": lambda adapters, base: edit_tensors(
        adapters / "adapter_model.safetensors", lambda tensors: tensors.popitem()
    ),
}
AFTER = {
    "head twice": write_head_twice,
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "end token": lambda folder: edit_json(folder / "generation_config.json", eos_token_id=2),
    "no query": lambda folder: change_query(folder, lambda tensors: tensors.pop(QUERY)),
    "a number": lambda folder: change_query(folder, lambda tensors: tensors[QUERY].mul_(2)),
}


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_a_planted_fault_is_found(fault, base_of, merge, monkeypatch, tmp_path):
    base = shutil.copytree(base_of("tied"), tmp_path / "base")
    adapters = write_adapters(tmp_path / "adapters", base)
    reload = merging.reload

    def plant_and_reload(folder, *rest):
        AFTER[fault](folder)
        return reload(folder, *rest)

    if fault in BEFORE:
        BEFORE[fault](adapters, base)
    else:
        monkeypatch.setattr(merging, "reload", plant_and_reload)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == (65 if fault in BEFORE else 76), printed
    assert len([line for line in printed.splitlines() if line.startswith("error: ")]) == 1
    assert not (tmp_path / "merged").exists()
    assert (tmp_path / "merged.unfinished").exists() == (fault in AFTER)


def test_adapters_of_a_quantized_base_are_merged_into_the_nearer_one(base_of, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base_of("llama"), IN_4_BITS)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0 and "Merging into the 4bit base" in printed, printed
    code, printed = merge(adapters, tmp_path / "other", "--base", "16bit")
    assert code == 0, printed
    name = "model.layers.0.mlp.up_proj.weight"  # has no adapter
    original = tensors_of(base_of("llama") / "model")[name]
    assert torch.equal(tensors_of(tmp_path / "other")[name], original)
    assert not torch.equal(tensors_of(tmp_path / "merged")[name], original)
    code, printed = merge(adapters, tmp_path / "bound", "--base", "16bit", "--bound", "1e-3")
    assert code == 76, printed


def test_nothing_is_written_over_and_a_full_disk_is_one_line(base_of, merge, monkeypatch, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base_of("llama"))
    assert merge(adapters, adapters)[0] == 73
    assert merge(base_of("llama") / "model", tmp_path / "merged")[0] == 64

    def fill(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "save_whole", fill)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 73 and "No space left" in printed, printed
    assert not (tmp_path / "merged").exists()
