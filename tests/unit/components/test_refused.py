# SPDX-License-Identifier: Apache-2.0
"""Calls that would fail, or would run and not do what they ask for, are refused before the start.

One table for each kind of cause: what is asked for, and a word that the refusal has to name. An
empty word stands for what looks alike and is taken.
"""

import importlib
import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin, LoggerType
from transformers import LlamaConfig, MixtralConfig, NllbMoeConfig

from components import device_checks, strategy_checks
from components.checks import find_missing_data, find_model_problems, find_problems
from components.expert_checks import (
    find_expert_problems,
    find_misfits_of_config,
    find_misfits_of_fsdp,
)
from components.hub_ids import find_missing
from components.model_folder import find_missing_weights
from components.pipeline_checks import find_pipeline_problems
from components.strategy import Strategy
from components.strategy_checks import (
    find_dropped_settings,
    find_misfits,
    find_missing_device,
    find_problems_of_environment,
)
from components.trackers import find_missing_tracker
from core.cli import parse
from example_arguments import language_model_arguments
from fakes import fake_accelerator, parallelism


def arguments(recipe, words):
    """The arguments of a recipe that is called with these words."""
    return parse(importlib.import_module(recipe).Arguments, words=words.split())


def assert_names(problems, word):
    """Assert that one problem was found, which names a word; none, if the word is empty."""
    found = list(problems)
    assert len(found) == bool(word) and all(word in line for line in found), found


# ---- Folders and files ----
def test_what_is_no_model_of_the_recipes_kind(tmp_path):
    """The folder is empty, has an adapter alone, or a model of another kind."""

    def problems(recipe="llama"):
        return find_model_problems(arguments(recipe, f"--model_name_or_path {tmp_path}"))

    assert_names(problems(), "config.json")
    adapter = json.dumps({"base_model_name_or_path": "owner/base"})
    (tmp_path / "adapter_config.json").write_text(adapter)
    (tmp_path / "adapter_model.safetensors").touch()
    assert_names(problems(), "owner/base")
    (tmp_path / "adapter_config.json").unlink()
    for kind, recipe, word in (
        ("bert", "llama", "recipes/bert.py"),
        ("modernbert", "mistral_pretrain", "recipes/bert.py"),
        ("t5", "mixtral", "recipes/t5.py"),
        ("vit", "llama_dpo", "recipes/vit.py"),
        ("bart", "llama", ""),  # transformers takes its decoder
        ("newer", "llama", ""),
        ("bert", "bert", ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert_names(problems(recipe), word)


def test_a_model_without_weights_can_only_be_planned(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path)]
    assert_names(find_missing_weights(language_model_arguments(*words)), "no weights")
    assert_names(find_missing_weights(language_model_arguments(*words, "--dry_run")), "")
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert_names(find_missing_weights(language_model_arguments(*words)), "")


def test_a_path_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("components.hub_ids.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("gpt2", "owner/model", "mine", "mine/model"):
        assert find_missing(name) is None
    for name in ("runs/run", "./run", "/none/run", "~/none/run", "a/b/run", "mine/modle"):
        assert "no such folder" in find_missing(name)
    (tmp_path / "cache" / "models--mine--modle" / "snapshots").mkdir(parents=True)
    assert find_missing("mine/modle") is None  # the hub gave it before
    for name, word in (
        ("rows.jsonl", ""),
        ("owner/rows", ""),
        ("rwos.jsonl", "no such file"),
        ("data/rwos.parquet", "no such file"),
        ("./rwos", "no such file"),
    ):
        assert_names(find_missing_data(language_model_arguments("--dataset_name", name)), word)


# ---- What accelerate would run in place of what was asked for ----
def accelerator_of(
    monkeypatch, version, strategy, reshard, replicas=1, processes=4, gpus_per_host=2
):
    """An Accelerator whose plugin is accelerate's own, made from the environment."""
    monkeypatch.setattr(torch.cpu, "device_count", lambda: gpus_per_host)
    exported = {
        "ACCELERATE_USE_FSDP": "true",
        "WORLD_SIZE": "4",
        "FSDP_VERSION": str(version),
        "FSDP_SHARDING_STRATEGY": strategy,
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
        "FSDP_SYNC_MODULE_STATES": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    return fake_accelerator(
        distributed_type=DistributedType.FSDP,
        state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None, backend="gloo"),
        parallelism_config=parallelism(dp_replicate=replicas) if replicas > 1 else None,
        num_processes=processes,
    )


@pytest.mark.parametrize(
    ("version", "strategy", "reshard", "replicas", "runs"),
    [
        *((1, name, "true", 1, "") for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")),
        (1, "FULL_SHARD", "full_shard", 1, ""),  # as `accelerate config` writes it
        (1, "NO_SHARD", "no_shard", 1, ""),
        (2, "FULL_SHARD", "true", 1, ""),
        (2, "FULL_SHARD", "false", 1, ""),
        (2, "2", "false", 1, ""),  # SHARD_GRAD_OP by its number
        (2, "4", "true", 2, ""),  # HYBRID_SHARD
        (2, "HYBRID_SHARD", "true", 2, ""),
        (1, "FULL_SHARD", "no_shard", 1, "FSDP1 FULL_SHARD"),
        (1, "FULL_SHARD", "false", 1, "FSDP1 FULL_SHARD"),
        (2, "NO_SHARD", "true", 1, "FSDP2 FULL_SHARD"),
        (2, "2", "true", 1, "FSDP2 FULL_SHARD"),
        (2, "HYBRID_SHARD", "true", 1, "FSDP2 FULL_SHARD"),
    ],
)
def test_a_sharding_that_accelerate_replaces(
    version, strategy, reshard, replicas, runs, monkeypatch
):
    accelerator = accelerator_of(monkeypatch, version, strategy, reshard, replicas)
    assert_names(find_dropped_settings(accelerator, Strategy.of(accelerator)), runs)


def test_fewer_processes_or_gpus_than_a_strategy_needs(monkeypatch):
    alone = accelerator_of(monkeypatch, 2, "FULL_SHARD", "true", processes=1)
    assert "requested more" in next(find_dropped_settings(alone, Strategy.of(alone)))
    apart = accelerator_of(monkeypatch, 1, "HYBRID_SHARD", "true", gpus_per_host=1)
    assert_names(find_dropped_settings(apart, Strategy.of(apart)), "neither shard nor average")


def test_a_launcher_that_started_one_of_several_processes(monkeypatch):
    launch = ["python", "-m", "accelerate.commands.launch", "train.py"]
    monkeypatch.setattr(strategy_checks, "find_launch", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for command, before, word in (
        (launch, {}, "requested more"),
        (launch, {"MASTER_ADDR": "127.0.0.1"}, ""),  # the cluster exports it
        (["bash"], {}, ""),
    ):
        parent = SimpleNamespace(cmdline=lambda it=command: it, environ=lambda it=before: it)
        monkeypatch.setattr(psutil.Process, "parents", lambda self, it=parent: [it])
        assert_names(find_dropped_settings(fake_accelerator(), Strategy("one process")), word)


# ---- What does not fit the strategy ----
DDP = Strategy("DDP")
FSDP1 = Strategy("FSDP1 FULL_SHARD", fsdp_version=1)
GRAD_OP = Strategy("FSDP1 SHARD_GRAD_OP", fsdp_version=1)
NO_SHARD = Strategy("FSDP1 NO_SHARD", fsdp_version=1)
FSDP2_FULL = Strategy("FSDP2 FULL_SHARD", fsdp_version=2)
ZERO2 = Strategy("DeepSpeed ZeRO-2", zero_stage=2)
ZERO3 = Strategy("DeepSpeed ZeRO-3", zero_stage=3)


@pytest.mark.parametrize(
    ("recipe", "words", "strategy", "precision", "word"),
    [
        ("llama", "--use_peft --load_in_8bit", FSDP2_FULL, "no", "int8"),
        ("llama", "--use_peft --load_in_8bit", DDP, "no", ""),
        ("llama", "--use_peft --load_in_4bit", FSDP2_FULL, "bf16", "4-bit"),
        ("llama", "--use_peft --load_in_4bit --dtype bf16", FSDP2_FULL, "bf16", ""),
        ("llama", "--use_peft --load_in_4bit", GRAD_OP, "no", "4-bit"),
        ("llama", "--use_peft --use_dora", FSDP1, "no", "--use_dora"),
        ("llama", "--use_peft --use_dora", FSDP2_FULL, "no", ""),
        ("llama", "--use_peft", NO_SHARD, "no", "single.yaml"),
        ("llama", "", NO_SHARD, "no", ""),
        ("llama", "--optim adamw_8bit", FSDP2_FULL, "no", "adamw_8bit"),
        ("llama", "--optim adamw_8bit", DDP, "no", ""),
        ("llama", "--torch_compile", FSDP1, "no", "FSDP1"),
        ("llama", "--torch_compile", FSDP2_FULL, "no", ""),
        ("llama", "--dtype bf16", FSDP2_FULL, "no", "fp32"),
        ("llama", "--dtype bf16", FSDP2_FULL, "bf16", ""),
        ("llama", "--no_master_weights", FSDP2_FULL, "bf16", "changes nothing"),
        ("mixtral", "--use_peft", FSDP1, "no", "experts"),
        ("mixtral", "--use_peft", FSDP2_FULL, "no", ""),
        ("mixtral", "--use_peft --lora_target_parameters", FSDP1, "no", ""),
    ],
)
def test_what_does_not_fit_a_strategy(recipe, words, strategy, precision, word):
    plugins = SimpleNamespace(
        deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(use_orig_params=True)
    )
    accelerator = fake_accelerator(state=plugins, mixed_precision=precision)
    assert_names(find_misfits(arguments(recipe, words), accelerator, strategy), word)


@pytest.mark.parametrize(
    ("strategy", "config", "word"),
    [
        (ZERO2, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
        (ZERO2, {"gradient_clipping": 1.0}, "gradient_clipping"),
        (ZERO2, {"tensor_parallel": {"autotp_size": 2}}, "fsdp2_tp.yaml"),
        (FSDP1, None, "trains nothing"),  # flat parameters
    ],
)
def test_what_a_file_would_be_refused_for_without_a_file_too(strategy, config, word):
    """Under torchrun, with what accelerate reads from the environment, there is none to check."""
    zero = SimpleNamespace(deepspeed_config=config) if config else None
    plugins = SimpleNamespace(
        deepspeed_plugin=zero, fsdp_plugin=SimpleNamespace(use_orig_params=False)
    )
    accelerator = fake_accelerator(state=plugins)
    assert_names(find_misfits(language_model_arguments(), accelerator, strategy), word)


@pytest.mark.parametrize(
    ("flags", "strategy", "environment", "word"),
    [
        (["--torch_compile"], DDP, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "command line"),
        (["--torch_compile"], DDP, {"ACCELERATE_DYNAMO_BACKEND": "NO"}, ""),
        ([], DDP, {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "does not shard"),
        ([], FSDP2_FULL, {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, ""),
        (
            [],
            ZERO2,
            {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "PATH": "/none"},
            "pip install ninja",
        ),
    ],
)
def test_what_does_not_fit_the_environment(flags, strategy, environment, word, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_names(find_problems_of_environment(language_model_arguments(*flags), strategy), word)


@pytest.mark.parametrize(
    ("named", "has_gpu", "word"), [({}, False, "rehearse"), ({}, True, ""), ({"cpu"}, False, "")]
)
def test_deepspeed_without_a_gpu_is_named_before_it_compiles(named, has_gpu, word, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    for device in named:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    assert_names(find_missing_device(), word)


@pytest.mark.parametrize(
    ("name", "word"),
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet-ml")],
)
def test_a_tracker_that_is_not_installed(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    assert_names(find_missing_tracker(language_model_arguments("--report_to", name)), word)


# ---- Pipelines and spread experts ----
@pytest.mark.parametrize(
    ("ranks", "words", "settings", "word"),
    [
        (2, "", {}, ""),
        (8, "--pp_size 4 --shard_stages --pipeline_schedule zbv", {}, ""),
        (6, "--pp_size 4", {}, "--pp_size"),
        (2, "--shard_stages", {}, "--shard_stages"),
        (2, "--num_microbatches 3", {}, "--num_microbatches"),
        (4, "--pp_size 4 --num_microbatches 2", {}, "at least 4"),
        (
            2,
            "--per_device_train_batch_size 5 --pipeline_schedule interleaved",
            {},
            "--per_device_train_batch_size 4",
        ),
        (4, "--shard_stages --optim adamw_8bit", {}, "adamw_8bit"),
        (8, "--pp_size 8", {"layers": 4}, "4 layers"),
        (2, "", {"strategy": FSDP2_FULL}, "pp.yaml"),
        (4, "", {"mesh": parallelism(tp=4)}, "parallelism_config"),
        (2, "", {"precision": "fp16"}, "bf16"),
    ],
)
def test_what_cannot_run_as_a_pipeline(ranks, words, settings, word, monkeypatch):
    args = arguments("llama_pipeline", words)
    in_force = settings.get("strategy") or Strategy("PP", pipeline=args.pp_size)
    monkeypatch.setattr("components.pipeline_checks.Strategy.of", lambda _: in_force)
    accelerator = SimpleNamespace(
        num_processes=ranks,
        mixed_precision=settings.get("precision", "no"),
        parallelism_config=settings.get("mesh"),
    )
    assert_names(find_pipeline_problems(args, accelerator, settings.get("layers")), word)


@pytest.mark.parametrize(
    ("ranks", "words", "strategy", "settings", "word"),
    [
        (4, "--ep_size 2", None, {}, ""),
        (2, "--ep_size 2 --use_peft --lora_target_parameters", None, {}, ""),
        (6, "--ep_size 4", None, {}, "--ep_size"),
        (6, "--ep_size 3", None, {}, "4 experts"),
        (2, "--ep_size 2 --optim adamw_8bit", None, {}, "adamw_8bit"),
        (2, "--ep_size 2 --use_peft", None, {}, "--lora_target_parameters"),
        (2, "--ep_size 2", None, {"mixed_precision": "fp16"}, "bf16"),
        (2, "--ep_size 2", ZERO3, {}, "ep.yaml"),
        (2, "--ep_size 2", FSDP1, {}, "ep.yaml"),
        (4, "--ep_size 2", DDP, {"parallelism_config": parallelism(tp=2)}, "share rows"),
    ],
)
def test_what_cannot_run_with_spread_experts(
    ranks, words, strategy, settings, word, tmp_path, monkeypatch
):
    MixtralConfig(num_local_experts=4).save_pretrained(tmp_path)
    args = arguments("mixtral", f"--model_name_or_path {tmp_path} {words}")
    in_force = strategy or Strategy("DDP x EP", is_split=True)
    monkeypatch.setattr("components.expert_checks.Strategy.of", lambda _: in_force)
    accelerator = fake_accelerator(num_processes=ranks, **{"mixed_precision": "bf16"} | settings)
    assert_names(find_expert_problems(args, accelerator), word)


def test_settings_of_fsdp_under_which_experts_cannot_be_spread():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    assert_names(find_misfits_of_fsdp(plugin), "")
    plugin.cpu_ram_efficient_loading = True
    assert_names(find_misfits_of_fsdp(plugin), "fsdp_cpu_ram_efficient_loading")


@pytest.mark.parametrize(
    ("config", "word"), [(LlamaConfig(), "no experts"), (NllbMoeConfig(), "no plan")]
)
def test_models_whose_experts_cannot_be_spread(config, word):
    assert_names(find_misfits_of_config(config, 2), word)


# ---- Devices ----
PACKAGES = {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"}
TURING = (7, 5)
AMPERE = (8, 0)
HOPPER = (9, 0)
ATTEND = "--attn_implementation"
ON_DEVICES = [  # words, compute capability, mixed precision, what is installed, word
    ("", None, "no", (), ""),
    (f"{ATTEND} flash_attention_2", None, "no", PACKAGES, "GPU"),
    (f"{ATTEND} flex_attention", None, "no", PACKAGES, "GPU"),
    (f"{ATTEND} flash_attention_2", HOPPER, "fp16", (), "pip install flash-attn"),
    (f"{ATTEND} kernels-community/flash-attn2", HOPPER, "fp16", (), "pip install kernels"),
    (f"{ATTEND} flash_attention_2", TURING, "fp16", PACKAGES, "8.0"),
    (f"{ATTEND} flash_attention_2", AMPERE, "fp16", {"flash-attn"}, ""),
    (f"{ATTEND} flash_attention_2", AMPERE, "no", PACKAGES, "bf16"),
    (f"{ATTEND} flash_attention_3", AMPERE, "fp16", PACKAGES, "9.0"),
    (f"{ATTEND} flash_attention_4", HOPPER, "fp16", {"flash-attn"}, "flash-attn-4"),
    (f"{ATTEND} varlne", HOPPER, "fp16", PACKAGES, "varlen"),
    (f"{ATTEND} varlen", None, "no", PACKAGES, "GPU"),
    (f"{ATTEND} varlen", AMPERE, "no", PACKAGES, "bf16"),
    (f"{ATTEND} varlen --dtype bfloat16 --use_peft --packing", AMPERE, "fp16", (), ""),
    ("--use_liger_kernel", None, "no", PACKAGES, "GPU"),
    ("--use_liger_kernel", HOPPER, "fp16", (), "pip install liger-kernel"),
    ("--tf32", TURING, "fp16", PACKAGES, "8.0"),
    ("--dtype bfloat16", AMPERE, "no", (), "float32"),
    ("--dtype bfloat16 --no_master_weights", AMPERE, "fp16", (), ""),
    ("--dtype bfloat16 --use_peft", AMPERE, "fp16", (), ""),
    ("--no_master_weights", AMPERE, "fp16", (), "changes nothing"),
    ("--optim paged_adamw_8bit", None, "no", PACKAGES, "adamw_8bit"),
    ("", TURING, "bf16", (), "bf16"),
    ("--use_peft --dtype bfloat16", TURING, "no", (), "float32"),
    ("", None, "bf16", (), ""),  # a rehearsal
]


@pytest.fixture
def problems_on(monkeypatch):
    """A function from words, device, precision and packages to the problems of llama.py."""

    def find(words, capability, precision, packages, **settings):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(device_checks, "is_installed", lambda name: name in packages)
        device = SimpleNamespace(type="cuda" if capability else "cpu")
        accelerator = fake_accelerator(device=device, mixed_precision=precision, **settings)
        return find_problems(language_model_arguments(*words.split()), accelerator)

    return find


@pytest.mark.parametrize(("words", "capability", "precision", "packages", "word"), ON_DEVICES)
def test_what_a_device_cannot_do(words, capability, precision, packages, word, problems_on):
    assert_names(problems_on(words, capability, precision, packages), word)


@pytest.mark.parametrize(
    ("words", "capability", "backend", "word"),
    [
        ("", AMPERE, "AO", "8.9"),
        ("--use_peft", HOPPER, "AO", "whole weights"),
        ("", HOPPER, "TE", "AO"),  # it would replace the output head
        ("", HOPPER, "AO", ""),
    ],
)
def test_fp8_is_for_what_has_it(words, capability, backend, word, problems_on, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert_names(problems_on(words, capability, "fp8", (), fp8_backend=backend), word)
