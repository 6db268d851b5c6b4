"""What cannot run is refused before the start, with the reason and what to use instead: each kernel, each lever.

In process, with a GPU that is only told of.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

import llama
import preflight
from fakes import fake_accelerator
from launching import REPO
from proof.jobs import MAKERS

PACKAGES = {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"}
AMPERE, ADA, HOPPER, TURING = (8, 0), (8, 9), (9, 0), (7, 5)
REFUSED = {  # flags, capability of the GPU or None for a CPU, packages that are there: what is said
    "flash attention on a CPU": (
        ["--attn_implementation", "flash_attention_2"],
        None,
        PACKAGES,
        "needs a GPU: use",
    ),
    "a hub kernel on a CPU": (
        ["--attn_implementation", "kernels-community/fa3"],
        None,
        PACKAGES,
        "needs a GPU: use",
    ),
    "flash attention that is not installed": (
        ["--attn_implementation", "flash_attention_2"],
        HOPPER,
        set(),
        "pip install flash-attn",
    ),
    "a hub kernel without the package": (
        ["--attn_implementation", "kernels-community/flash-attn2"],
        HOPPER,
        set(),
        "pip install kernels",
    ),
    "flash attention 2 on Turing": (
        ["--attn_implementation", "flash_attention_2"],
        TURING,
        PACKAGES,
        "8.0 or more",
    ),
    "flash attention 4 without its package": (
        ["--attn_implementation", "flash_attention_4"],
        HOPPER,
        {"flash-attn"},
        "pip install flash-attn-4,",
    ),
    "flash attention 4 on Ampere": (
        ["--attn_implementation", "flash_attention_4"],
        AMPERE,
        PACKAGES,
        "9.0 or more",
    ),
    "flash attention 3 on Ampere": (
        ["--attn_implementation", "flash_attention_3"],
        AMPERE,
        PACKAGES,
        "9.0 or more",
    ),
    "an attention that nobody knows": (
        ["--attn_implementation", "varlne"],
        HOPPER,
        PACKAGES,
        "no attention has this name: did you mean varlen? Available: eager, flash",
    ),
    "varlen on a CPU": (["--attn_implementation", "varlen"], None, PACKAGES, "needs an NVIDIA GPU"),
    "varlen on Turing": (
        ["--attn_implementation", "varlen", "--dtype", "float16", "--use_peft"],
        TURING,
        PACKAGES,
        "8.0 or more",
    ),
    "Liger on a CPU": (["--use_liger_kernel"], None, PACKAGES, "Triton kernels need a GPU"),
    "Liger that is not installed": (
        ["--use_liger_kernel"],
        HOPPER,
        set(),
        "pip install liger-kernel",
    ),
    "TF32 on a CPU": (["--tf32"], None, PACKAGES, "compute capability 8.0"),
    "TF32 on Turing": (["--tf32"], TURING, PACKAGES, "compute capability 8.0"),
    "bf16 weights without a master copy": (
        ["--dtype", "bfloat16"],
        AMPERE,
        set(),
        "use --dtype float32",
    ),
    "no master copy of what has one": (
        ["--no_master_weights"],
        AMPERE,
        set(),
        "it changes nothing",
    ),
    "paging without a GPU": (
        ["--optim", "paged_adamw_8bit"],
        None,
        PACKAGES,
        "adamw_8bit or adamw_torch_fused",
    ),
}
ACCEPTED = {
    "nothing": ([], None, set()),
    "flash attention 2": (
        ["--attn_implementation", "flash_attention_2", "--packing"],
        AMPERE,
        {"flash-attn"},
    ),
    "flash attention 3": (["--attn_implementation", "flash_attention_3"], HOPPER, {"flash-attn-3"}),
    "a hub kernel": (
        ["--attn_implementation", "kernels-community/flash-attn2"],
        AMPERE,
        {"kernels"},
    ),
    "Liger, TF32, flex": (
        ["--use_liger_kernel", "--tf32", "--attn_implementation", "flex_attention"],
        ADA,
        PACKAGES,
    ),
    "packing": (["--packing"], None, set()),
    "bf16 weights whose loss of updates is asked for": (
        ["--dtype", "bfloat16", "--no_master_weights"],
        AMPERE,
        set(),
    ),
    "adapters on bf16 weights": (["--dtype", "bfloat16", "--use_peft"], AMPERE, set()),
    "varlen": (
        ["--attn_implementation", "varlen", "--dtype", "bfloat16", "--use_peft", "--packing"],
        AMPERE,
        set(),
    ),
    "padding free, by length": (
        ["--padding_free", "--train_sampling_strategy", "group_by_length"],
        None,
        set(),
    ),
}


@pytest.fixture
def problems_of(monkeypatch):
    """A function from flags, capability, packages, precision and environment to the problems."""
    versions = {"transformers": "5.23.0"}
    version_of = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or version_of(name)
    )

    def find(
        flags, capability=None, packages=(), mixed_precision="fp16", transformers="5.23.0", **env
    ):
        versions["transformers"] = transformers
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["llama.py", *flags])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(preflight, "installed", lambda name: name in packages)
        device = SimpleNamespace(type="cuda" if capability else "cpu")
        state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
        accelerator = SimpleNamespace(
            device=device,
            mixed_precision=mixed_precision,
            num_processes=1,
            distributed_type="NO",
            state=state,
        )
        return preflight.find_problems(llama.parse_args(), accelerator)

    return find


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name, problems_of):
    flags, capability, packages, says = REFUSED[name]
    found = problems_of(flags, capability, packages)
    assert len(found) == 1 and says in found[0] and found[0].startswith(flags[0]), found


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_run_is_not(name, problems_of):
    assert problems_of(*ACCEPTED[name]) == []


@pytest.mark.parametrize(
    ("capability", "flags", "says"),
    [
        (None, [], "8.9 (Ada, Hopper) or more"),
        (AMPERE, [], "8.9 (Ada, Hopper) or more"),
        (HOPPER, ["--use_peft"], "whole weights only"),
        (HOPPER, [], None),
    ],
)
def test_fp8_is_for_what_has_it(capability, flags, says, problems_of):
    found = problems_of(flags, capability, ACCELERATE_MIXED_PRECISION="fp8")
    assert (says in found[0] and len(found) == 1) if says else found == []


EMULATED = "no bf16 hardware"
FLASH = ["--attn_implementation", "flash_attention_2"]
HUB_FLASH = ["--attn_implementation", "kernels-community/flash-attn2"]


@pytest.mark.parametrize(
    ("flags", "capability", "mixed_precision", "says"),
    [
        ([], TURING, "bf16", f"(compute capability 7.5) has {EMULATED}"),
        (["--use_peft", "--load_in_4bit"], TURING, "bf16", "pass --mixed_precision fp16"),
        (["--use_peft", "--dtype", "bfloat16"], TURING, "no", "use --dtype float32"),
        (["--use_peft", "--dtype", "bfloat16"], TURING, "fp16", None),  # multiplies in fp16
        ([], TURING, "fp16", None),
        ([], TURING, "no", None),
        ([], AMPERE, "bf16", None),
        ([], None, "bf16", None),  # a CPU, in a rehearsal
        (FLASH, AMPERE, "no", "in bf16 and fp16 only: pass --mixed_precision bf16"),
        (HUB_FLASH, AMPERE, "no", "in bf16 and fp16 only"),
        (["--attn_implementation", "varlen"], AMPERE, "no", "launch with --mixed_precision bf16"),
        (FLASH, AMPERE, "bf16", None),
        ([*FLASH, "--use_peft", "--dtype", "bfloat16"], AMPERE, "no", None),
        (["--attn_implementation", "flex_attention"], AMPERE, "no", None),
    ],
)
def test_what_the_hardware_or_kernel_cannot_compute_in_is_refused(
    flags, capability, mixed_precision, says, problems_of
):
    found = problems_of(flags, capability, PACKAGES, mixed_precision)
    if says:
        assert len(found) == 1 and says in found[0]
    else:
        assert found == []


def test_bf16_is_not_refused_by_the_numbers_of_amds_gpus(problems_of, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert problems_of([], (7, 0), mixed_precision="bf16") == []


@pytest.mark.parametrize(
    ("version", "refused"),
    [("5.17.0", True), ("5.18.1", True), ("5.19.0", False), ("5.23.0", False), ("6.0.0", False)],
)
def test_tf32_is_refused_where_transformers_would_round_positions(version, refused, problems_of):
    found = problems_of(["--tf32"], HOPPER, transformers=version)
    assert len(found) == refused and all("transformers 5.19" in problem for problem in found)
    assert problems_of([], HOPPER, transformers=version) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--packing", "--padding_free"], "choose one"),
        (["--packing", "--train_sampling_strategy", "group_by_length"], "all of one length"),
    ],
)
def test_levers_that_exclude_each_other_are_refused(flags, says, problems_of):
    found = problems_of(flags)
    assert len(found) == 1 and says in found[0]


def test_compiling_has_one_owner(problems_of):
    found = problems_of(["--torch_compile"], HOPPER, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    assert len(found) == 1 and "the command line owns it" in found[0]
    assert problems_of(["--torch_compile"], HOPPER, ACCELERATE_DYNAMO_BACKEND="NO") == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(), None),
        (
            BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16),
            "BloomForCausalLM",
        ),  # knows no positions
        (OPTConfig(num_hidden_layers=1), "OPTForCausalLM"),  # takes them, and masks without
        (Qwen3Config(num_hidden_layers=1), None),
        (MistralConfig(num_hidden_layers=1), None),
        (Gemma2Config(num_hidden_layers=2), None),
        (GPT2Config(n_layer=1), None),
        (Qwen3NextConfig(), "linear_attention"),  # its state runs on
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_models_that_cannot_keep_packed_rows_apart_are_refused(config, says, capsys, monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for flags in (
        ["--packing"],
        ["--padding_free"],
        ["--attn_implementation", "flash_attention_2"],
        [],
    ):
        monkeypatch.setattr(sys, "argv", ["llama.py", *flags])
        if not (flags and says):
            preflight.check_model(llama.parse_args(), model, 0)
            continue
        with pytest.raises(SystemExit, match="64"):
            preflight.check_model(llama.parse_args(), model, 0)
        assert says in capsys.readouterr().err


MIXTURE = MixtralConfig(
    hidden_size=8,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=16,
)


DDP, FSDP2 = ("DDP", 0, -1), ("FSDP2 FULL_SHARD", 2, -1)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function from model, flags, device, precision and strategy to the summary of the start."""

    def report(config, flags, device, mixed_precision, in_force):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(tmp_path), *flags])
        monkeypatch.setattr(preflight, "strategy_in_force", lambda _: in_force)
        accelerator = fake_accelerator(
            device=SimpleNamespace(type=device),
            mixed_precision=mixed_precision,
            gradient_state=SimpleNamespace(plugin_kwargs={}),
        )
        rows, told = [0], {"sample": "one row"}
        facts = {"rows_per_step": 1}
        preflight.report_start(
            accelerator, llama.parse_args(), model, None, rows, rows, 1, facts, told
        )
        return json.loads((tmp_path / "run.json").read_text())["summary"]

    return report


@pytest.mark.parametrize(
    ("flags", "mixed_precision", "in_force", "computes_in"),
    [
        ([], "bf16", DDP, "float32"),
        ([], "no", DDP, "float32"),
        ([], "no", FSDP2, "float32"),
        (["--dtype", "float16", "--use_peft"], "no", DDP, "float16"),
    ],
)
def test_experts_without_a_kernel_are_told_at_the_start(
    flags, mixed_precision, in_force, computes_in, start
):
    warning = start(MIXTURE, flags, "cuda", mixed_precision, in_force)["warning"]
    assert (
        f"multiplied in {computes_in}" in warning and "use --dtype bfloat16 --use_peft" in warning
    )


@pytest.mark.parametrize(
    ("config", "flags", "device", "mixed_precision", "in_force"),
    [
        (MIXTURE, [], "cuda", "bf16", FSDP2),  # casts the weights
        (MIXTURE, ["--dtype", "bfloat16", "--use_peft"], "cuda", "bf16", DDP),
        (MIXTURE, [], "cpu", "bf16", DDP),
        (LlamaConfig(num_hidden_layers=1), [], "cuda", "bf16", DDP),  # has no experts
    ],
    ids=["cast", "bf16 base", "CPU", "no experts"],
)
def test_nothing_is_told_where_they_have_one(
    config, flags, device, mixed_precision, in_force, start
):
    assert "warning" not in start(config, flags, device, mixed_precision, in_force)


def test_a_model_whose_attention_is_not_told_where_rows_end_is_refused(capsys, monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]])
        )
    monkeypatch.setattr(sys, "argv", ["llama.py", "--packing"])  # its masks know positions
    preflight.check_model(llama.parse_args(), model, 0)
    monkeypatch.setattr(sys, "argv", ["llama.py", "--attn_implementation", "flash_attention_2"])
    with pytest.raises(SystemExit, match="64"):
        preflight.check_model(llama.parse_args(), model, 0)
    assert (
        "do not tell their attention where rows end): use --attn_implementation sdpa"
        in capsys.readouterr().err
    )


def test_a_token_without_an_embedding_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=16,
        )
    )
    preflight.check_model(llama.parse_args(), model, 15)
    with pytest.raises(SystemExit, match="64"):
        preflight.check_model(llama.parse_args(), model, 16)
    assert (
        "the rows have a token 16, but the model has no embedding for it" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "names", "leaves_out"),
    [
        (["--load_in_4bit"], "--load_in_4bit: a quantized base", ["8bit", "rslora", "dora"]),
        (["--load_in_8bit"], "--load_in_8bit: a quantized base", ["4bit", "rslora", "dora"]),
        (["--use_dora"], "--use_dora: for adapters only", ["bit", "rslora"]),
        (["--use_rslora", "--use_dora"], "--use_rslora and --use_dora: for adapters only", ["bit"]),
    ],
)
def test_only_the_flags_that_were_given_are_named(flags, names, leaves_out, problems_of):
    (problem,) = problems_of(flags)
    assert problem.startswith(names) and "add --use_peft" in problem
    assert not any(word in problem for word in leaves_out)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16")],
)
def test_dtypes_have_accelerates_names_too(given, dtype, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--dtype", given])
    assert llama.parse_args().dtype == dtype


def test_other_dtypes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--dtype", "int8"])
    with pytest.raises(SystemExit, match="64"):
        llama.parse_args()
    assert "invalid choice: 'int8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["./missing", "/nowhere/missing", "runs/full/missing", "~/missing"]
)
def test_a_folder_that_is_missing_is_not_asked_of_the_hub(name, problems_of):
    (problem,) = problems_of(["--model_name_or_path", name])
    assert problem == f"--model_name_or_path {Path(name)}: no such folder"


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_hub_ids_are_not_folders(name, problems_of):
    assert problems_of(["--model_name_or_path", name]) == []


def load_tokenizer_of(folder, capsys):
    with pytest.raises(SystemExit, match="64"):
        llama.load_tokenizer(str(folder))
    return capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_told_what_it_needs(tmp_path, capsys):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    told = load_tokenizer_of(tmp_path, capsys)
    assert f"{tmp_path}: no tokenizer in this folder: copy tokenizer.json" in told
    assert len(told.splitlines()) == 1


def test_a_tokenizer_that_is_damaged_is_not_called_missing(tmp_path, capsys):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    told = load_tokenizer_of(tmp_path, capsys)
    assert "no tokenizer: " in told and "in this folder" not in told


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["q_prj"],
            "--lora_target_modules q_prj: no layer of LlamaForCausalLM has this name: did you mean q_proj?",
        ),
        (["q_proj", "v_prj"], "--lora_target_modules v_prj"),  # peft would train q_proj alone
        (
            ["nothing"],
            "has this name: Its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj",
        ),
        (
            ["norm"],
            "--lora_target_modules norm: this is a LlamaRMSNorm of LlamaForCausalLM, which takes no adapter: Its",
        ),
        (["q_proj", "self_attn"], "--lora_target_modules self_attn: this is a LlamaAttention"),
    ],
)
def test_layers_that_the_model_has_not_are_named_with_those_it_has(names, says, capsys):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
    with pytest.raises(SystemExit, match="64"):
        preflight.check_adapters(model, names)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "names", [["all-linear"], ["q_proj", "v_proj"], ["mlp.up_proj"], ["embed_tokens"]]
)
def test_layers_that_it_has_are_not(names):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
    preflight.check_adapters(model, names)


@pytest.mark.parametrize("recipe", sorted(MAKERS))
def test_every_recipe_checks_the_layers_before_it_makes_adapters(recipe):
    source = (REPO / "recipes" / f"{recipe}.py").read_text()
    check, made = "preflight.check_adapters(model, args.lora_target_modules)", "= get_peft_model("
    assert source.count(check) == 1 and source.index(check) < source.index(made)


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        (("FSDP2 FULL_SHARD", 2, -1), True),
        (("DeepSpeed ZeRO-1", 0, 1), True),
        (("DDP", 0, -1), False),
        (("one process", 0, -1), False),
    ],
)
def test_batch_norm_is_refused_where_ranks_would_have_statistics_of_their_own(
    strategy, refused, monkeypatch, capsys
):
    monkeypatch.setattr(preflight, "strategy_in_force", lambda accelerator: strategy)
    monkeypatch.setattr(sys, "argv", ["vit.py"])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    if not refused:
        preflight.check_running_statistics(None, model)
        return
    with pytest.raises(SystemExit, match="64"):
        preflight.check_running_statistics(None, model)
    assert "use ddp.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "adapters", "refused"),
    [
        (("DeepSpeed ZeRO-3", 0, 3), True, True),
        (("FSDP1 FULL_SHARD", 1, -1), True, True),
        (("DeepSpeed ZeRO-3", 0, 3), False, False),
        (("FSDP2 FULL_SHARD", 2, -1), True, False),
        (("DeepSpeed ZeRO-2", 0, 2), True, False),
        (("one process", 0, -1), True, False),
    ],
)
def test_adapters_of_the_head_are_refused_where_each_piece_of_the_loss_would_gather_them(
    strategy, adapters, refused, monkeypatch, capsys
):
    monkeypatch.setattr(preflight, "strategy_in_force", lambda accelerator: strategy)
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    shape = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    targets = ["q_proj", "lm_head"] if adapters else ["q_proj"]
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**shape)), LoraConfig(target_modules=targets)
    )
    args = SimpleNamespace(max_logits_mib=None)
    if not refused:
        preflight.check_head(None, args, model)
        return
    with pytest.raises(SystemExit, match="64"):
        preflight.check_head(None, args, model)
    assert "leave it out of --lora_target_modules" in capsys.readouterr().err
