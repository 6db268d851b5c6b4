# SPDX-License-Identifier: Apache-2.0
"""Conflicts between arguments, and faults of the launcher's file, are reported all at once."""

import json
import shlex
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest

import bert
import bert_ner
import llama
import llama_dpo
import llama_pipeline
import mistral_pretrain
import mixtral
import t5
import vit
from broken_configs import FSDP2, TYPO, TYPO_SAID, ZERO_WITHOUT_PRECISION
from components.arguments import CommonArguments
from components.checks import check_launch, find_conflicts, find_missing_data, find_problems
from components.cli import parse_arguments
from components.model_folder import find_missing_weights
from components.summary import plan_command
from example_arguments import MixtureArguments, language_model_arguments
from fakes import fake_accelerator


def conflicts(*flags):
    return list(find_conflicts(language_model_arguments(*flags)))


def test_nothing_is_wrong_with_the_defaults():
    assert conflicts() == []


@pytest.mark.parametrize(
    ("recipe", "flag", "least"), [(llama_pipeline, "--pp_size", 2), (mixtral, "--ep_size", 1)]
)
def test_a_size_of_zero_is_one_line(recipe, flag, least):
    args = parse_arguments(recipe.Arguments, words=[flag, "0"])
    accelerator = fake_accelerator(num_processes=2, pipeline_ranks=0, expert_ranks=0)
    assert f"{flag} 0: must be {least} or more" in find_problems(args, accelerator)


def test_a_recipes_own_rules_stand_beside_its_arguments():
    assert conflicts("--packing", "--padding_free") == ["--packing and --padding_free: choose one"]
    assert conflicts("--packing") == conflicts("--padding_free") == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--predict_with_generate --eval_strategy no", "--eval_strategy no makes none"),
        ("--num_predictions 5", "--num_predictions has no effect without --predict_with_generate"),
        ("--generation_max_new_tokens 5", "--generation_max_new_tokens has no effect without"),
        (
            "--load_best_model_at_end --metric_for_best_model eval_exact_match",
            "exact_match needs --predict_with_generate: add it",
        ),
    ],
)
def test_answers_that_cannot_be_generated_are_one_line(words, says):
    args = parse_arguments(llama.Arguments, words=words.split())
    (problem,) = find_conflicts(args)
    assert says in problem


def test_answers_may_choose_the_best_model():
    words = "--predict_with_generate --load_best_model_at_end --metric_for_best_model exact_match"
    args = parse_arguments(llama.Arguments, words=words.split())
    assert list(find_conflicts(args)) == []


@dataclass(kw_only=True)
class PlainArguments(CommonArguments):
    """Arguments of a recipe that offers neither a quantized base nor variants of LoRA."""

    GROUP = "Example"
    model_name_or_path: str = "gpt2"
    dataset_name: str = ""


def test_rules_about_what_a_recipe_does_not_offer_do_not_run():
    args = parse_arguments(PlainArguments, words=["--use_peft", "--lora_dropout", "0.1"])
    assert list(find_conflicts(args)) == []


@pytest.mark.parametrize(
    ("flags", "names", "leaves_out"),
    [
        (["--load_in_4bit"], "--load_in_4bit: a quantized base", ["8bit", "rslora", "dora"]),
        (["--load_in_8bit"], "--load_in_8bit: a quantized base", ["4bit", "rslora", "dora"]),
        (["--use_dora"], "--use_dora: for adapters only", ["bit", "rslora"]),
        (["--use_rslora", "--use_dora"], "--use_rslora and --use_dora: for adapters only", ["bit"]),
        (["--lora_r", "8"], "--lora_r: for adapters only", ["alpha", "dropout", "bit"]),
        (["--lora_alpha", "8"], "--lora_alpha: for adapters only", ["lora_r"]),
        (["--lora_dropout", "0.1"], "--lora_dropout: for adapters only", ["lora_r"]),
        (["--lora_target_modules", "q"], "--lora_target_modules: for adapters only", ["lora_r"]),
    ],
)
def test_only_the_flags_that_were_given_are_named(flags, names, leaves_out):
    (problem,) = conflicts(*flags)
    assert problem.startswith(names) and "add --use_peft" in problem
    assert not any(word in problem for word in leaves_out)


def test_two_quantizations_exclude_each_other():
    (problem,) = conflicts("--load_in_8bit", "--load_in_4bit", "--use_peft")
    assert problem == "--load_in_8bit and --load_in_4bit: choose one"


def test_float16_weights_are_trained_only_under_adapters():
    (problem,) = conflicts("--dtype", "float16")
    assert problem.startswith("float16 weights cannot be trained without an fp32 master copy: use")
    assert conflicts("--dtype", "float16", "--use_peft") == []


def test_dropout_on_what_is_no_layer_is_refused():
    def conflicts(*flags):
        words = ["--lora_dropout", "0.1", *flags]
        return list(find_conflicts(parse_arguments(MixtureArguments, words=words)))

    assert "--lora_dropout is for adapters of linear layers" in conflicts("--use_peft")[0]
    assert conflicts("--use_peft", "--lora_target_parameters") == []
    (problem,) = conflicts("--lora_target_parameters")
    flags = "--lora_target_parameters and --lora_dropout"
    assert problem == f"{flags}: for adapters only: add --use_peft"


def test_flags_of_adapters_with_their_defaults_or_with_adapters_are_taken():
    assert conflicts("--lora_r", "16", "--lora_target_modules", "all-linear") == []
    assert conflicts("--use_peft", "--lora_r", "8", "--use_dora") == []


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16")],
)
def test_dtypes_have_accelerates_names_too(given, dtype):
    assert language_model_arguments("--dtype", given).dtype == dtype


def test_other_dtypes_are_refused(capsys):
    with pytest.raises(SystemExit, match="64"):
        language_model_arguments("--dtype", "int8")
    assert "invalid choice: 'int8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["./missing", "/nowhere/missing", "runs/full/missing", "runs/missing", "~/missing"]
)
def test_a_folder_that_is_missing_is_not_asked_of_the_hub(name):
    (problem,) = conflicts("--model_name_or_path", name)
    assert problem == f"--model_name_or_path {name}: no such folder"


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_hub_ids_are_not_folders(name):
    assert conflicts("--model_name_or_path", name) == []


def test_a_folder_without_a_model_is_refused(tmp_path):
    (problem,) = conflicts("--model_name_or_path", str(tmp_path))
    assert problem == f"--model_name_or_path {tmp_path}: no config.json in it"


def model_folder(path, **files):
    """A folder with these files, {name without its dot: object}."""
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_json", ".json")).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("also_config", [True, False])
def test_an_adapter_is_no_model(also_config, tmp_path):
    files = {"adapter_config_json": {"base_model_name_or_path": "owner/base"}}
    if also_config:  # as that of a classifier has
        files["config_json"] = {"model_type": "bert"}
    folder = model_folder(tmp_path / "adapter", **files)
    (folder / "adapter_model.safetensors").touch()
    (problem,) = conflicts("--model_name_or_path", str(folder))
    assert problem == (
        f"--model_name_or_path {folder}: is an adapter of owner/base, not a model: pass "
        "--model_name_or_path owner/base to train a new adapter, or first merge this one into it: "
        "python scripts/merge.py"
    )


@pytest.mark.parametrize(
    ("recipe", "config", "says"),
    [
        ("llama", {"model_type": "bert"}, "recipes/bert.py and recipes/bert_ner.py train encoders"),
        (
            "mistral_pretrain",
            {"model_type": "modernbert"},
            "recipes/bert.py and recipes/bert_ner.py",
        ),
        ("mixtral", {"model_type": "t5"}, "recipes/t5.py trains models of sequence to sequence"),
        ("llama_dpo", {"model_type": "vit"}, "recipes/vit.py trains models of images"),
        ("llama", {"model_type": "bert", "is_decoder": True}, None),
        ("llama", {"model_type": "gpt2"}, None),
        ("llama", {"model_type": "bart"}, None),  # transformers takes its decoder
        ("llama", {"model_type": "newer"}, None),
        ("bert", {"model_type": "bert"}, None),
        ("t5", {"model_type": "t5"}, None),
    ],
)
def test_a_model_of_another_kind_is_refused_with_the_recipe_for_it(recipe, config, says, tmp_path):
    folder = model_folder(tmp_path / "model", config_json=config)
    problems = column_problems(recipe, "--model_name_or_path", str(folder))
    if says is None:
        assert problems == []
        return
    (problem,) = problems
    kind = config["model_type"]
    assert f"{folder}: a model of type {kind} is no causal language model: {says}" in problem


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_config_that_cannot_be_read_is_left_to_the_loading(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert conflicts("--model_name_or_path", str(tmp_path)) == []


def test_a_model_without_weights_can_only_be_planned(tmp_path):
    folder = model_folder(tmp_path / "model", config_json={"model_type": "llama"})
    given = ["--model_name_or_path", str(folder)]
    (problem,) = find_missing_weights(language_model_arguments(*given))
    assert problem.startswith(f"--model_name_or_path {folder}: no weights in it: copy the model's")
    assert not list(find_missing_weights(language_model_arguments(*given, "--dry_run")))
    for name in ("model.safetensors", "pytorch_model-00001-of-00002.bin"):
        (folder / name).touch()
        assert not list(find_missing_weights(language_model_arguments(*given)))
        (folder / name).unlink()
    assert not list(find_missing_weights(language_model_arguments()))  # from the hub


def test_data_that_are_missing_are_found_by_their_names_alone(tmp_path, monkeypatch):
    def missing(*flags):
        return list(find_missing_data(language_model_arguments(*flags)))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "rows").mkdir()
    for name in ("rows.jsonl", str(tmp_path / "rows"), "rows", "owner/rows", "rwos"):
        assert missing("--dataset_name", name) == []
    for name in ("rwos.jsonl", "rwos.csv", "rwos.json", "data/rwos.parquet", "rwos.txt"):
        (problem,) = missing("--dataset_name", name)
        assert problem.startswith(f"{name}: no such file")
    assert missing("--dataset_name", "./rwos") == ["./rwos: no such file or folder"]
    held_out = ["--dataset_name", "rows.jsonl", "--eval_dataset_name", "rwos.jsonl"]
    assert missing(*held_out) == ["rwos.jsonl: no such file; did you mean rows.jsonl?"]
    assert missing(*held_out, "--eval_strategy", "no") == []


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").touch()
    (problem,) = conflicts("--output_dir", str(tmp_path / "run"))
    assert problem == f"--output_dir {tmp_path / 'run'}: is a file"


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere"])
def test_a_run_whose_events_would_be_outside_its_folder_is_refused(name):
    (problem,) = conflicts("--report_to", "tensorboard", "--run_name", name)
    assert problem == f"--run_name {name}: has to be a folder inside --output_dir"
    assert conflicts("--report_to", "wandb", "--run_name", name) == []


def test_only_a_folder_is_continued_from(tmp_path):
    assert conflicts("--resume_from_checkpoint", str(tmp_path)) == []
    assert conflicts("--resume_from_checkpoint", "none") == []
    (problem,) = conflicts("--resume_from_checkpoint", "newest")
    assert problem == "--resume_from_checkpoint newest: neither auto nor none nor a folder"


def test_only_what_is_an_argument_is_allowed_to_change():
    assert conflicts("--allow_change", "data", "seed", "lora_r") == []
    (problem,) = conflicts("--allow_change", "sed", "data", "lorar")
    assert problem == "--allow_change lorar sed: not the name of an argument"


class TestLaunch:
    """check_launch of a process whose parent is a launcher."""

    @pytest.fixture
    def start(self, tmp_path, monkeypatch, capsys):
        def start(text, *flags):
            (tmp_path / "config.yaml").write_text(text)
            program = ["python", "accelerate", "launch"]
            command = [*program, "--config_file", "config.yaml", "recipes/llama.py"]
            parents = [
                SimpleNamespace(cmdline=lambda: ["sh"], cwd=lambda: "/"),
                SimpleNamespace(cmdline=lambda: command, cwd=lambda: str(tmp_path)),
            ]
            monkeypatch.setattr(psutil.Process, "parents", lambda self: parents)
            monkeypatch.setattr(sys, "argv", ["llama.py"])
            monkeypatch.chdir(tmp_path)
            code = 0
            try:
                check_launch(language_model_arguments(*flags))
            except SystemExit as error:
                code = error.code
            return code, capsys.readouterr().err

        return start

    def test_a_fault_ends_it_with_one_line_each_and_what_is_wrong_with_the_arguments(self, start):
        code, said = start(TYPO + "  fsdp_offlod_params: true\n", "--use_dora")
        assert code == 64 and said.splitlines() == [
            f"error: {TYPO_SAID}",
            "error: config.yaml:8: fsdp_config.fsdp_offlod_params: no such key: accelerate ignores "
            "it silently; fix: fsdp_offload_params",
            "error: --use_dora: for adapters only: add --use_peft",
        ]

    def test_what_the_recipes_do_not_run_under_ends_it(self, start):
        code, said = start(
            ZERO_WITHOUT_PRECISION + "  zero_stage: 2\n  gradient_accumulation_steps: 4\n"
        )
        assert code == 64 and "command line: --gradient_accumulation_steps; fix: delete" in said

    def test_what_only_costs_is_a_warning(self, start):
        code, said = start(FSDP2.replace("  fsdp_version: 2\n", ""))
        says = "warning: config.yaml:4: fsdp_config.fsdp_version: missing, so FSDP1 runs"
        assert code == 0 and said.startswith(says)

    def test_a_file_that_cannot_be_read_again_is_said(self, start):
        code, said = start("[")
        says = "warning: the launcher's config is not checked: config.yaml cannot be read"
        assert code == 0 and said.startswith(says)

    def test_the_planner_gets_the_launchers_file(self, start):
        start(FSDP2)
        command = plan_command(SimpleNamespace(num_processes=8), 5)
        begin = "python scripts/plan_memory.py --config_file config.yaml --num_processes 8"
        assert shlex.join(command).startswith(f"{begin} --longest 5")


# ---- Columns ----
RECIPES = {
    recipe.__name__: recipe
    for recipe in (bert, bert_ner, llama, llama_dpo, mistral_pretrain, mixtral, t5, vit)
}


def column_problems(name, *words):
    """The problems that a recipe finds with these words of its command line."""
    return list(find_conflicts(parse_arguments(RECIPES[name].Arguments, words=words)))


@pytest.mark.parametrize(
    ("recipe", "columns", "problem"),
    [
        (
            "llama",
            "promt=a completion=b",
            "output, question, answer, system, tools; did you mean prompt=a?",
        ),
        ("llama", "promt=question", "did you mean prompt=question?"),
        ("llama_dpo", "good=a", "no such role; the roles are prompt, chosen, rejected"),
        ("t5", "question=source", "--columns question=source: the role comes first: source=quest"),
        ("llama", "prompt", "--columns prompt: has to be ROLE=COLUMN; the roles are messages, "),
        ("llama", "prompt=", "--columns prompt=: has to be ROLE=COLUMN"),
        ("llama", "prompt=a prompt=b", "--columns prompt=b: prompt is given twice"),
        ("bert", "text_pair=b", "--columns text_pair: name the first text too, as text=COLUMN"),
    ],
)
def test_pairs_that_cannot_be_meant_are_refused(recipe, columns, problem):
    (found,) = column_problems(recipe, "--columns", *columns.split())
    assert problem in found


@pytest.mark.parametrize(
    ("recipe", "columns", "flags"),
    [
        ("bert", "text=a text_pair=b label=c", "--text_columns a b --label_column c"),
        ("bert", "text=a", "--text_columns a"),
        ("bert_ner", "tokens=a tags=b", "--text_column_name a --label_column_name b"),
        ("t5", "target=b source=a", "--source_column a --target_column b"),
        ("mistral_pretrain", "text=a", "--text_column a"),
        ("vit", "image=a label=b", "--image_column_name a --label_column_name b"),
    ],
)
def test_columns_are_another_way_to_write_the_flags_of_columns(recipe, columns, flags):
    kind = RECIPES[recipe].Arguments
    by_columns = vars(parse_arguments(kind, words=["--columns", *columns.split()]))
    by_flags = vars(parse_arguments(kind, words=flags.split()))
    assert by_columns | {"columns": []} == by_flags
    assert column_problems(recipe, "--columns", *columns.split(), *flags.split()) == []


@pytest.mark.parametrize("recipe", [llama, mixtral])
def test_every_format_of_a_prompt_and_its_answer_can_be_named(recipe):
    for question, answer in recipe.PROMPT_AND_ANSWER.items():
        words = ["--columns", f"{question}=a", f"{answer}=b"]
        assert column_problems(recipe.__name__, *words) == []


def test_columns_and_a_flag_that_name_different_columns_are_refused():
    words = ["--columns", "text=a", "label=b", "--label_column", "c"]
    assert column_problems("bert", *words) == [
        "--columns text=a label=b and --label_column name different columns: leave one out"
    ]


# ---- Rows that are held out ----
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--eval_split 0.1 --eval_dataset_name a", "--eval_split and --eval_dataset_name: choose"),
        ("--eval_split 1.5", "--eval_split 1.5: use a share below 1, or a whole number of rows"),
        ("--eval_split -1", "--eval_split -1.0: must be 0 or more"),
    ],
)
def test_an_impossible_share_to_hold_out_is_refused(words, problem):
    (found,) = column_problems("llama", *words.split())
    assert found.startswith(problem)
    assert column_problems("llama", "--eval_split", "20") == []


def test_documents_are_held_out_by_their_own_flag():
    (found,) = column_problems("mistral_pretrain", "--eval_split", "0.1")
    assert found.startswith("--eval_split: ") and found.endswith("use --num_eval_documents")


def test_the_best_model_is_not_restored_from_checkpoints_without_optimizer_state():
    (problem,) = conflicts("--save_only_model", "--load_best_model_at_end")
    assert problem.endswith("choose one")


def test_modules_are_trained_whole_only_beside_adapters():
    (problem,) = conflicts("--modules_to_save", "lm_head")
    assert problem.endswith("add --use_peft")
    assert conflicts("--modules_to_save", "lm_head", "--use_peft") == []
