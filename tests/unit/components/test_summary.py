# SPDX-License-Identifier: Apache-2.0
"""The start summary says what is in force, in one order; run.json and a dry run follow from it."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

from components import launch_command, summary
from components.status import process_status
from components.strategy import Strategy
from components.summary import (
    ModelSize,
    bytes_on_disk,
    plan_command,
    summarize,
    unused_gpus,
    wrapped,
)
from example_arguments import language_model_arguments
from fakes import fake_accelerator, parallelism

MIXTURE = MixtralConfig(
    hidden_size=8,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=16,
)
LLAMA = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    vocab_size=16,
)
ONE_PROCESS = Strategy("one process")
DDP = Strategy("DDP")
FSDP2 = Strategy("FSDP2 FULL_SHARD", fsdp_version=2)
ZERO3 = Strategy("DeepSpeed ZeRO-3", zero_stage=3)
NOTES = {"sample": "one [[row]]", "batch": "8 rows per step", "train rows": "24", "loss": "whole"}
IDENTITY = {"rows_per_step": 8, "data": "abc"}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function from model, flags and what is in force to the lines in run.json."""

    def start(
        config,
        flags=(),
        strategy=ONE_PROCESS,
        notes=NOTES,
        device="cpu",
        sync_each_batch=False,
        **settings,
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        monkeypatch.setattr(summary, "Strategy", SimpleNamespace(of=lambda _: strategy))
        plugin_kwargs = {"sync_each_batch": True} if sync_each_batch else {}
        accelerator = fake_accelerator(
            device=SimpleNamespace(type=device),
            gradient_state=SimpleNamespace(plugin_kwargs=plugin_kwargs),
            **settings,
        )
        args = language_model_arguments("--output_dir", str(tmp_path), *flags)
        summarize(accelerator, args, model, notes, IDENTITY, 3)
        return json.loads((tmp_path / "run.json").read_text())["summary"]

    return start


class TestLines:
    def test_a_recipes_warning_stands_before_those_of_the_arguments(self, start):
        lines = start(LLAMA, ["--use_peft"], notes={"warning": "rows are long", **NOTES})
        assert list(lines)[-1] == "warning"
        assert lines["warning"].startswith("rows are long\na learning rate of 2e-05 is low for ad")
        assert "warning" not in start(LLAMA, notes={"warning": "", **NOTES})

    def test_they_are_printed_in_one_order_and_aligned(self, start, capsys):
        lines = start(LLAMA, notes={"packing": "full", **NOTES})
        printed = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0].strip() for line in printed] == list(lines)
        assert list(lines) == [
            "model",
            "trained",
            "strategy",
            "precision",
            "kernels",
            "batch",
            "length",
            "steps",
            "schedule",
            "checkpoints",
            "train rows",
            "loss",
            "sample",
            "packing",
        ]
        assert printed[0] == "      model: gpt2, 728 parameters"
        assert printed[1] == "    trained: all weights"
        assert printed[2] == "   strategy: one process, 1 x cpu"
        assert printed[3] == "  precision: weights float32, mixed precision no, quantization no"
        assert printed[4] == "    kernels: attention sdpa"
        assert printed[5] == "      batch: 8 rows per step"
        assert printed[6] == "     length: at most 1,024 tokens (--max_length)"
        assert printed[7] == "      steps: 3 in 3 epochs"
        assert printed[8] == "   schedule: learning rate 2e-05, linear, no warmup"
        assert printed[9] == "checkpoints: every 500 steps"
        assert printed[-2:] == ["     sample: one [[row]]", "    packing: full"]

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--load_in_8bit"], "int8"),
            (["--load_in_4bit"], "nf4"),
            (["--load_in_4bit", "--bnb_4bit_quant_type", "fp4"], "fp4"),
        ],
    )
    def test_the_quantization_is_named(self, flags, says, start):
        assert start(LLAMA, flags)["precision"].endswith(f"quantization {says}")

    def test_kernels_are_named(self, start):
        flags = ["--torch_compile", "--use_liger_kernel", "--tf32"]
        says = "attention sdpa, torch.compile of each kind of layer, Liger, TF32"
        assert start(LLAMA, flags)["kernels"] == says

    def test_without_save_steps_a_checkpoint_is_of_a_stop(self, start):
        assert start(LLAMA, ["--save_steps", "0"])["checkpoints"] == "when the run is stopped"

    def test_it_says_when_the_gradients_of_pipelines_are_reduced(self, start):
        accumulate = ["--gradient_accumulation_steps", "2"]
        replicas = Strategy("PP 2 x replicas 2", pipeline=2)
        shards = Strategy("PP 2 x FSDP2 2", pipeline=2, shards_stages=True)
        lines = [start(LLAMA, accumulate, found, num_processes=4) for found in (replicas, shards)]
        assert lines[0]["gradients"] == "reduced once per step"
        assert lines[1]["gradients"].startswith("reduced after each batch")
        assert "gradients" not in start(LLAMA, accumulate, replicas, num_processes=2)

    @pytest.mark.parametrize(
        ("strategy", "sync_each_batch", "says"),
        [
            (DDP, False, "reduced once per step"),
            (Strategy("DeepSpeed ZeRO-1", zero_stage=1), False, "reduced once per step"),
            (ZERO3, False, "reduced in each micro-batch, so that no rank holds them whole"),
            (FSDP2, True, "reduced in each micro-batch, so that no rank holds them whole"),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_it_says_when_gradients_are_reduced(self, strategy, sync_each_batch, says, start):
        accumulate = ["--gradient_accumulation_steps", "2"]
        several = {"num_processes": 2, "sync_each_batch": sync_each_batch}
        assert start(LLAMA, accumulate, strategy, **several)["gradients"] == says
        assert "gradients" not in start(LLAMA, accumulate, strategy)
        assert "gradients" not in start(LLAMA, [], strategy, **several)


class TestWidth:
    def test_lines_wrap_at_80_columns_below_their_text(self):
        text = "word " * 40
        lines = wrapped("warning", text).splitlines()
        assert len(lines) > 2 and max(map(len, lines)) <= 80
        assert lines[0].startswith("    warning: word")
        assert all(line.startswith(13 * " " + "word") for line in lines[1:])
        assert " ".join(" ".join(lines).split()[1:]) == text.strip()

    def test_a_path_is_not_cut_and_lines_of_a_sample_stay_lines(self):
        path = "/a/" + 90 * "b"
        assert path in wrapped("model", f"{path}, 3 parameters")
        assert wrapped("sample", "one\n  two") == "     sample: one\n" + 13 * " " + "  two"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "learning rate 2e-05, linear, no warmup"),
        (
            ["--lr_scheduler_type", "cosine", "--warmup_steps", "0.1"],
            "learning rate 2e-05, cosine, 20 warmup steps",
        ),
    ],
)
def test_the_schedule_is_told(flags, says):
    assert summary.describe_schedule(language_model_arguments(*flags), 200) == says


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "1,200 in 3 epochs"),
        (["--num_train_epochs", "1"], "1,200 in 1 epoch"),
        (["--max_steps", "1200"], "1,200 (--max_steps)"),
    ],
)
def test_the_length_of_the_run_is_told(flags, says):
    assert summary.describe_steps(language_model_arguments(*flags), 1200) == says


def test_adapters_are_told_with_their_share():
    args = language_model_arguments("--use_peft")
    says = "LoRA adapters, 32 parameters (4.21% of all)"
    assert summary.describe_trained(args, ModelSize(760, 32)) == says


class TestHints:
    """Defaults that suit all weights, and not adapters."""

    RATE = "a learning rate of 2e-05 is low for adapters: pass --learning_rate 0.0002"
    BASE = "the frozen base is loaded in float32: pass --dtype bfloat16 to halve its memory"

    @pytest.mark.parametrize(
        ("flags", "settings", "says"),
        [
            (["--use_peft"], {"device": "cuda"}, [RATE, BASE]),
            (["--use_peft"], {"device": "cpu"}, [RATE]),
            (["--use_peft"], {"device": "cpu", "mixed_precision": "bf16"}, [RATE, BASE]),
            (["--use_peft", "--learning_rate", "4e-5"], {}, [RATE.replace("2e-05", "4e-05")]),
            (["--use_peft", "--learning_rate", "5e-5"], {"device": "cuda"}, [BASE]),
            (["--use_peft", "--dtype", "bfloat16"], {"device": "cuda"}, [RATE]),
            (["--learning_rate", "1e-6"], {"device": "cuda"}, []),
        ],
    )
    def test_they_are_told_with_the_flag_to_pass(self, flags, settings, says, start):
        assert start(LLAMA, flags, **settings).get("warning", "").splitlines() == says

    def test_fp16_is_proposed_where_that_is_the_mixed_precision(self, start):
        lines = start(LLAMA, ["--use_peft"], device="cuda", mixed_precision="fp16")
        assert "pass --dtype float16 to" in lines["warning"]

    def test_deepspeed_casts_the_base_by_itself(self, start):
        lines = start(LLAMA, ["--use_peft"], ZERO3, device="cuda", mixed_precision="bf16")
        assert lines["warning"] == self.RATE


def test_the_size_counts_what_is_trained():
    model = LlamaForCausalLM(LLAMA)
    total = model.num_parameters()
    assert ModelSize.of(model) == ModelSize(total, total)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    assert ModelSize.of(model) == ModelSize(total + 32, 32)  # 2 x 8 and 8 x 2


class TestRunJson:
    def test_it_has_all_that_a_run_is(self, start, tmp_path, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        monkeypatch.setenv("FSDP_VERSION", "2")
        monkeypatch.setenv("ACCELERATE_API_TOKEN", "secret")
        monkeypatch.setenv("HOME_OF", "mine")
        lines = start(LLAMA, ["--seed", "7"])
        run = json.loads((tmp_path / "run.json").read_text())
        assert list(run) == ["summary", "arguments", *IDENTITY, "loss_unit", "launch", "versions"]
        assert run["loss_unit"] == "nats per token"
        assert run["summary"] == lines and run["arguments"]["seed"] == 7
        assert {key: run[key] for key in IDENTITY} == IDENTITY
        assert run["launch"]["ACCELERATE_MIXED_PRECISION"] == "no"
        assert run["launch"]["FSDP_VERSION"] == "2"
        assert not {"ACCELERATE_API_TOKEN", "HOME_OF"} & set(run["launch"])
        assert run["versions"]["torch"] == torch.__version__

    def test_only_the_main_process_writes_and_prints(self, tmp_path, capsys):
        args = language_model_arguments("--output_dir", str(tmp_path))
        accelerator = fake_accelerator(is_main_process=False)
        summarize(accelerator, args, LlamaForCausalLM(LLAMA), NOTES, IDENTITY, 3)
        assert not (tmp_path / "run.json").exists() and capsys.readouterr().out == ""


class TestExperts:
    @pytest.mark.parametrize(
        ("flags", "mixed_precision", "strategy", "computes_in"),
        [
            ([], "bf16", DDP, "float32"),
            ([], "no", DDP, "float32"),
            ([], "no", FSDP2, "float32"),
            (["--dtype", "float16", "--use_peft"], "no", DDP, "float16"),
        ],
    )
    def test_those_without_a_kernel_are_told_at_the_start(
        self, flags, mixed_precision, strategy, computes_in, start
    ):
        warning = start(MIXTURE, flags, strategy, device="cuda", mixed_precision=mixed_precision)[
            "warning"
        ]
        assert f"multiplied in {computes_in}" in warning
        assert "use --dtype bfloat16 --use_peft" in warning

    @pytest.mark.parametrize(
        ("config", "flags", "device", "strategy"),
        [
            (MIXTURE, [], "cuda", FSDP2),  # casts the weights
            (MIXTURE, ["--dtype", "bfloat16", "--use_peft"], "cuda", DDP),
            (MIXTURE, [], "cpu", DDP),
            (LlamaConfig(num_hidden_layers=1), [], "cuda", DDP),  # has no experts
        ],
        ids=["cast", "bf16 base", "CPU", "no experts"],
    )
    def test_nothing_is_told_where_they_have_one(self, config, flags, device, strategy, start):
        lines = start(config, flags, strategy, device=device, mixed_precision="bf16")
        assert "experts" not in lines.get("warning", "")


class TestLargerShards:
    """FSDP2 cuts experts by their number, and ranks beyond it hold as much again."""

    @pytest.mark.parametrize(("ranks", "says"), [(8, ""), (16, "holds 1/8.1 of")])
    def test_they_are_told_with_what_cuts_evenly(self, ranks, says, start):
        lines = start(MIXTURE, strategy=FSDP2, num_processes=ranks)
        assert says in lines.get("warning", "")
        assert bool(says) == ("fsdp1_full_shard.yaml" in lines.get("warning", ""))

    def test_where_experts_are_spread_no_engine_is_named_that_refuses_it(self, start):
        warning = start(MIXTURE, strategy=FSDP2, num_processes=16, expert_ranks=8)["warning"]
        assert "holds 1/8.1 of" in warning and "yaml" not in warning

    @pytest.mark.parametrize("strategy", [ZERO3, Strategy("FSDP1 FULL_SHARD", fsdp_version=1)])
    def test_other_engines_cut_evenly(self, strategy, start):
        assert "warning" not in start(MIXTURE, strategy=strategy, num_processes=16)


class TestUnusedGpus:
    """Shipped YAMLs ask for one process: on a host with several GPUs that is said loudly."""

    @pytest.fixture
    def accelerator(self, monkeypatch):
        def accelerator(kind, ranks, here, gpus, replicas=1):
            monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
            plugin = SimpleNamespace(fsdp_version=2, reshard_after_forward=True)
            return SimpleNamespace(
                distributed_type=kind,
                num_processes=ranks,
                process_index=0,
                device=SimpleNamespace(type="cuda"),
                is_main_process=True,
                state=SimpleNamespace(fsdp_plugin=plugin),
                gradient_state=SimpleNamespace(plugin_kwargs={}),
                parallelism_config=parallelism(dp_replicate=replicas),
                mixed_precision="bf16",
            )

        return accelerator

    @pytest.mark.parametrize(
        ("case", "strategy", "says"),
        [
            (
                (DistributedType.FSDP, 1, 1, 8),
                FSDP2,
                "1 of 8 GPUs is used, and nothing is sharded: "
                "pass --num_processes 8 to accelerate launch",
            ),
            (
                (DistributedType.DEEPSPEED, 1, 1, 4),
                ZERO3,
                "1 of 4 GPUs is used, and nothing is sharded: "
                "pass --num_processes 4 to accelerate launch",
            ),
            (
                (DistributedType.MULTI_GPU, 1, 1, 2),
                ONE_PROCESS,
                "1 of 2 GPUs is used: pass --num_processes 2 to accelerate launch",
            ),
            (
                (DistributedType.MULTI_GPU, 2, 2, 8),
                DDP,
                "2 of 8 GPUs are used: pass --num_processes 8 to accelerate launch",
            ),
            (
                (DistributedType.FSDP, 8, 4, 8),
                FSDP2,
                "4 of 8 GPUs are used on each host: pass --num_processes 16 to accelerate launch",
            ),
            (
                (DistributedType.FSDP, 4, 4, 8, 2),
                Strategy("FSDP2 HYBRID_SHARD", fsdp_version=2),
                "4 of 8 GPUs are used: pass --num_processes 8 to "
                "accelerate launch and enlarge the mesh in the YAML to match",
            ),
            ((DistributedType.FSDP, 8, 8, 8), FSDP2, None),
            ((DistributedType.NO, 1, 1, 8), ONE_PROCESS, None),  # single.yaml: asked for one
        ],
    )
    def test_fewer_processes_than_gpus_are_told_with_the_flag(
        self, case, strategy, says, accelerator
    ):
        assert unused_gpus(accelerator(*case), strategy) == says

    def test_it_heads_the_start_summary(self, accelerator, capsys, tmp_path):
        args = language_model_arguments("--output_dir", str(tmp_path))
        model = torch.nn.Linear(1, 1)
        model.config = SimpleNamespace(_attn_implementation="sdpa")
        for gpus, first in (
            (8, "    WARNING: 1 of 8 GPUs is used, and nothing is sharded"),
            (1, "      model: "),
        ):
            fsdp = accelerator(DistributedType.FSDP, 1, 1, gpus)
            summarize(fsdp, args, model, NOTES, IDENTITY, 3)
            assert capsys.readouterr().out.startswith(first)


class TestDryRun:
    @pytest.fixture
    def end(self, monkeypatch, tmp_path, capsys):
        """A function from free bytes and options to exit code and output of a dry run."""
        monkeypatch.setattr(sys, "argv", ["recipes/llama.py", "--dry_run", "--seed", "7"])
        monkeypatch.setattr(launch_command, "find_launch", lambda: None)
        ended = []

        def end(free, flags=(), planned_row=None):
            usage = SimpleNamespace(free=free)
            monkeypatch.setattr(summary.shutil, "disk_usage", lambda path: usage)
            folder = tmp_path / "deep" / "run"
            args = language_model_arguments("--dry_run", "--output_dir", str(folder), *flags)
            accelerator = fake_accelerator(
                print=print,
                wait_for_everyone=lambda: None,
                end_training=lambda: ended.append(True),
            )
            with pytest.raises(SystemExit) as error:
                summarize(
                    accelerator, args, LlamaForCausalLM(LLAMA), NOTES, IDENTITY, 3, planned_row
                )
            assert ended.pop() and not folder.parent.exists()
            return error.value.code, capsys.readouterr()

        process_status.cache_clear()
        yield end
        process_status.cache_clear()

    def test_it_says_what_the_disk_needs_and_ends_with_0(self, end):
        code, said = end(free=2**31)
        assert code == 0 and process_status().state == "done"
        *summary, last = said.out.splitlines()
        shown = " ".join(" ".join(summary).split())
        assert "disk: checkpoints and result take up to 2.71e-05 GiB, 2 GiB" in shown
        assert last == "Dry run: all of this fits together; nothing was trained or written."
        assert "plan: " not in said.out

    def test_a_disk_without_room_is_refused_with_73(self, end):
        needed = 728 * (12 * 3 + 4)
        assert end(free=needed)[0] == 0
        code, said = end(free=needed - 1)
        assert code == 73 and process_status().state == "failed"
        assert f"error: {needed:,} bytes are needed for checkpoints and result" in said.err

    def test_the_plan_is_the_call_with_another_first_word(self, end):
        _, said = end(free=2**31, planned_row=12)
        assert said.out.splitlines()[-3:-1] == [
            "       plan: python scripts/plan_memory.py --config_file YAML \\",
            "    --num_processes 1 --longest 12 recipes/llama.py --seed 7",
        ]


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


def test_the_plan_has_what_the_launcher_was_given(monkeypatch):
    given = {"num_machines": 2, "mixed_precision": "fp16", "gpu_ids": "all"}
    launch = SimpleNamespace(config_file="my configs/fsdp.yaml", given=given)
    monkeypatch.setattr(launch_command, "find_launch", lambda: launch)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    words = plan_command(SimpleNamespace(num_processes=16), 5)
    assert words[2:] == [
        *["--config_file", "my configs/fsdp.yaml", "--num_processes", "16"],
        *["--num_machines", "2", "--mixed_precision", "fp16", "--longest", "5", "train.py"],
    ]
