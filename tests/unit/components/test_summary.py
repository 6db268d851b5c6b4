# SPDX-License-Identifier: Apache-2.0
"""What run.json says of a run, and what is said at the start of GPUs and of the disk."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from components.status import process_status
from components.strategy import Strategy
from components.summary import ModelSize, bytes_on_disk, summarize, unused_gpus
from example_arguments import language_model_arguments
from fakes import fake_accelerator, parallelism

LLAMA = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    vocab_size=16,
)
ONE_PROCESS = Strategy("one process")
FSDP2 = Strategy("FSDP2 FULL_SHARD", fsdp_version=2)
NOTES = {"sample": "one [[row]]", "batch": "8 rows per step", "train rows": "24", "loss": "whole"}
IDENTITY = {"rows_per_step": 8, "data": "abc"}


def start(folder, *flags, **settings):
    """Tell what is in force for a tiny model."""
    gradients = SimpleNamespace(plugin_kwargs={})
    accelerator = fake_accelerator(gradient_state=gradients, **settings)
    args = language_model_arguments("--output_dir", str(folder), *flags)
    summarize(accelerator, args, AutoModelForCausalLM.from_config(LLAMA), NOTES, IDENTITY, 3)


def test_run_json_has_all_that_a_run_is_and_no_secret(tmp_path, monkeypatch):
    exported = {"ACCELERATE_MIXED_PRECISION": "no", "FSDP_VERSION": "2"}
    secret = {"ACCELERATE_API_TOKEN": "secret", "HOME_OF": "mine"}
    for name, value in (exported | secret).items():
        monkeypatch.setenv(name, value)
    start(tmp_path, "--seed", "7")
    run = json.loads((tmp_path / "run.json").read_text())
    assert list(run) == ["summary", "arguments", *IDENTITY, "loss_unit", "launch", "versions"]
    assert NOTES.items() <= run["summary"].items() and IDENTITY.items() <= run.items()
    assert run["loss_unit"] == "nats per token" and run["arguments"]["seed"] == 7
    assert exported.items() <= run["launch"].items() and not secret.keys() & run["launch"].keys()
    assert run["versions"]["torch"] == torch.__version__


def test_only_the_main_process_writes_and_prints(tmp_path, capsys):
    start(tmp_path, is_main_process=False)
    assert not (tmp_path / "run.json").exists() and capsys.readouterr().out == ""


def test_the_size_counts_what_is_trained():
    model = AutoModelForCausalLM.from_config(LLAMA)
    total = model.num_parameters()
    assert ModelSize.of(model) == ModelSize(total, total)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    assert ModelSize.of(model) == ModelSize(total + 32, 32)  # 2 x 8 and 8 x 2


@pytest.mark.parametrize(
    ("kind", "ranks", "here", "gpus", "strategy", "word"),
    [
        (DistributedType.FSDP, 1, 1, 8, FSDP2, "--num_processes 8"),
        (DistributedType.MULTI_GPU, 1, 1, 2, ONE_PROCESS, "--num_processes 2"),
        (DistributedType.FSDP, 8, 4, 8, FSDP2, "--num_processes 16"),  # on two hosts
        (DistributedType.FSDP, 8, 8, 8, FSDP2, None),
        (DistributedType.NO, 1, 1, 8, ONE_PROCESS, None),  # single.yaml: asked for one
    ],
)
def test_fewer_processes_than_gpus_are_told(kind, ranks, here, gpus, strategy, word, monkeypatch):
    """Shipped YAMLs ask for one process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    accelerator = fake_accelerator(
        distributed_type=kind,
        num_processes=ranks,
        device=SimpleNamespace(type="cuda"),
        parallelism_config=parallelism(),
    )
    told = unused_gpus(accelerator, strategy)
    assert told is None if word is None else word in told


@pytest.mark.parametrize(("missing", "code"), [(0, 0), (1, 73)])
def test_a_dry_run_ends_with_73_if_the_disk_has_no_room(missing, code, tmp_path, monkeypatch):
    needed = 728 * (12 * 3 + 4)  # three checkpoints, and the result
    usage = SimpleNamespace(free=needed - missing)
    monkeypatch.setattr("components.summary.shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(sys, "argv", ["recipes/llama.py", "--dry_run"])
    process_status.cache_clear()
    with pytest.raises(SystemExit) as ended:
        start(
            tmp_path / "deep" / "run",
            "--dry_run",
            print=print,
            wait_for_everyone=lambda: None,
            end_training=lambda: None,
        )
    process_status.cache_clear()
    assert ended.value.code == code and not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("flags", "elements"),
    [
        ([], 12 * 10 * 3 + 4 * 1000),
        (["--save_total_limit", "5"], 12 * 10 * 6 + 4 * 1000),
        (["--dtype", "bfloat16"], 12 * 10 * 3 + 2 * 1000),
        (["--use_peft"], 12 * 10 * 3 + 4 * 10),
        (["--load_best_model_at_end"], 12 * 10 * 4 + 4 * 1000),
        (["--save_only_model"], (12 + 4 * 2) * 10 + 4 * 1000),
    ],
)
def test_checkpoints_and_result_are_counted_in_bytes(flags, elements):
    args = language_model_arguments(*flags)
    assert bytes_on_disk(args, ModelSize(total=1000, trained=10)) == elements
