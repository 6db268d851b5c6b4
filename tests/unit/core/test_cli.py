# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line: arguments from a file, flags as people write them, and calls refused in
one line."""

import importlib
import json

import pytest

from core import cli


def parse(*words, recipe="llama"):
    return cli.parse(importlib.import_module(recipe).Arguments, words=[*map(str, words)])


def refused(capsys, *words):
    """The lines that a wrong call prints."""
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 64
    return capsys.readouterr().err.splitlines()


def test_a_flag_may_be_written_with_dashes_or_underscores():
    assert parse("--learning-rate", "1e-3").learning_rate == 1e-3
    assert parse("--learning_rate=1e-3").learning_rate == 1e-3


@pytest.mark.parametrize("name", ["lora_modules_to_save", "lora-modules-to-save"])
def test_trls_name_of_a_flag_is_understood_too(name, tmp_path):
    args = parse("--use_peft", f"--{name}", "lm_head", "norm")
    assert args.modules_to_save == ["lm_head", "norm"]
    path = tmp_path / "run.yaml"
    path.write_text(f"use_peft: true\n{name}: [lm_head]\n")
    assert parse("--config", path).modules_to_save == ["lm_head"]


def test_flags_of_other_programs_are_told_what_is_meant_here(capsys):
    flags = ["--lr", "1e-3", "--bf16", "--evaluation_strategy=no", "--torch_dtype", "auto"]
    [line] = refused(capsys, *flags, "--num_processes", "2")
    meant = ["--learning_rate", "--mixed_precision bf16", "--eval_strategy", "--dtype"]
    assert all(one in line for one in [*meant, "accelerate launch --num_processes"])


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_config_gives_arguments_and_the_command_line_overrides_them(form, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 2e-4\npacking: true\ncolumns: [prompt=q, completion=a]\n")
    args = parse(*form.format(path).split(), "--learning_rate", "1e-3")
    assert (args.learning_rate, args.packing) == (1e-3, True)
    assert args.columns == ["prompt=q", "completion=a"]


def test_settings_of_a_schedule_are_json_or_a_mapping_of_a_config(tmp_path, capsys):
    settings = {"min_lr": 1e-6}
    assert parse("--lr_scheduler_kwargs", '{"min_lr": 1e-6}').lr_scheduler_kwargs == settings
    path = tmp_path / "run.yaml"
    path.write_text("lr_scheduler_kwargs:\n  min_lr: 1.0e-6\n")
    assert parse("--config", path).lr_scheduler_kwargs == settings
    for wrong in ("min_lr=1e-6", "3"):
        [line] = refused(capsys, "--lr_scheduler_kwargs", wrong)
        assert f"{wrong} is not a JSON object" in line


def test_values_of_a_config_are_read_as_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "eval_strategy: no\npacking: yes\nmax_steps: -1\neval_dataset_name: null\nseed:\n"
    )
    args = parse("--config", path, "--output_dir=-o")
    assert (args.eval_strategy, args.packing, args.max_steps) == ("no", True, -1)
    assert (args.eval_dataset_name, args.seed) == (None, 42)
    path.write_text(json.dumps(vars(args)))
    assert parse("--config", path) == args


def test_recomputation_is_full_without_a_value_and_off_or_on_in_a_run_json_of_old(tmp_path, capsys):
    assert parse().gradient_checkpointing == "no"
    assert parse("--gradient_checkpointing", "--packing").gradient_checkpointing == "full"
    assert parse("--gradient_checkpointing", "selective").gradient_checkpointing == "selective"
    path = tmp_path / "run.json"
    for recorded, value in ((True, "full"), (False, "no"), ("selective", "selective")):
        path.write_text(json.dumps({"arguments": {"gradient_checkpointing": recorded}}))
        assert parse("--config", path).gradient_checkpointing == value
    [line] = refused(capsys, "--gradient_checkpointing", "half")
    assert "'half' (choose from" in line


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.yaml", "config: b.yaml", "config"),
        ("a.yaml", "help: yes", "help"),
        ("a.yaml", "learning_rat: 1", "learning_rate"),
        ("a.yaml", "distributed_type: FSDP", "distributed_type"),
        ("a.yaml", "a: [", "expected"),
        ("a.json", "{", "Expecting"),
        ("a.yaml", "lora_r: x", "'x'"),
    ],
)
def test_a_wrong_config_is_one_line(name, content, word, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    [line] = refused(capsys, "--config", tmp_path / name)
    assert word in line
    [line] = refused(capsys, "--config", tmp_path / "none.yaml")
    assert "none.yaml" in line


# ---- Flags that contradict each other ----
CONFLICTS = [
    ("llama", "--packing --padding_free", "choose one"),
    ("llama", "--packing --train_sampling_strategy group_by_length", "use random"),
    ("llama", "--load_in_4bit", "--use_peft"),
    ("llama", "--lora_r 8", "--use_peft"),
    ("llama", "--lora_r 16 --lora_target_modules all-linear", ""),
    ("llama", "--dtype float16", "fp32"),
    ("llama", "--optim adam", "adamw_torch_fused"),
    ("llama_dpo", "--beta 0", "--beta"),
    ("llama_distill", "--loss_type jsd --beta 0", "forward_kl"),
    ("llama_distill", "--loss_type reverse_kl --beta 0.3", "jsd"),
    ("llama_grpo", "--reward_weights 1", "REWARDS"),
    ("llama_grpo", "--num_iterations 2 --save_steps 3", "--save_steps 3"),
    ("llama_grpo", "--num_generations 1", "above 1"),
    ("llama_grpo", "--top_k 50", "--top_k"),
    ("llama", "--learn last --no_assistant_only_loss", "--learn"),
    ("llama", "--metric_for_best_model accuracy", "--load_best_model_at_end"),
    ("llama", "--resume_from_checkpoint newest", "newest"),
    ("llama", "--eval_split 0.1 --eval_dataset_name a", "choose one"),
    ("llama", "--dataset_name a b --dataset_weights 1", "2 data sets"),
    ("mistral_pretrain", "--eval_split 0.1", "--num_eval_documents"),
    ("t5", "--source_lang en", "--target_lang"),
    ("llama_pipeline", "--use_peft", "recipes/llama.py"),
    ("t5", "--columns question=source", "target"),
    ("llama", "--columns prompt=", "ROLE=COLUMN"),
    ("bert", "--columns text_pair=b", "text=COLUMN"),
]


@pytest.mark.parametrize(("recipe", "words", "word"), CONFLICTS)
def test_flags_that_contradict_each_other_are_refused_in_one_line(recipe, words, word, capsys):
    if not word:
        parse(*words.split(), recipe=recipe)
        return
    with pytest.raises(SystemExit) as stopped:
        parse(*words.split(), recipe=recipe)
    [line] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 64 and word in line


@pytest.mark.parametrize(
    ("recipe", "columns", "flags"),
    [
        ("bert", "text=a text_pair=b label=c", "--text_columns a b --label_column c"),
        ("bert_ner", "tokens=a tags=b", "--text_column_name a --label_column_name b"),
        ("t5", "target=b source=a", "--source_column a --target_column b"),
        ("mistral_pretrain", "text=a", "--text_column a"),
        ("vit", "image=a label=b", "--image_column_name a --label_column_name b"),
    ],
)
def test_columns_are_another_way_to_write_the_flags_of_columns(recipe, columns, flags):
    short = parse("--columns", *columns.split(), recipe=recipe)
    assert vars(short) | {"columns": []} == vars(parse(*flags.split(), recipe=recipe))
