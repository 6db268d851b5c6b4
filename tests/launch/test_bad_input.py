# SPDX-License-Identifier: Apache-2.0
"""Wrong input ends the process with 64 (usage) or 65 (data) and a few lines, never a traceback.

tests/unit/components/test_rows.py has all kinds of bad rows and files."""

import json
import shutil
from dataclasses import dataclass

import pytest
from transformers import BertConfig, GPT2Config

from components.exits import Exit
from launching import recipe
from row_files import GOOD

WITH_BAD_LINE = f'{GOOD}\n{{"prompt": "a", \n{GOOD}\n'


@dataclass(frozen=True)
class BadCall:
    """A call that must be refused.

    Attributes:
        words: of the command line; {tmp} stands for the folder of the fixture `inputs`, {tiny} for
            that of the tiny model and its rows. Rows are good unless the words name others.
        code: with which it ends.
        says: parts of the message.
    """

    words: str
    code: Exit
    says: list[str]


CALLS = {
    "missing file": BadCall(
        "--dataset_name {tmp}/rwos.jsonl",
        Exit.DATA,
        ["rwos.jsonl: no such file; did you mean", "/rows.jsonl?"],
    ),
    "missing file, told before the model is looked for": BadCall(
        "--dataset_name {tmp}/rwos.jsonl --model_name_or_path owner/none",
        Exit.DATA,
        ["rwos.jsonl: no such file; did you mean", "/rows.jsonl?"],
    ),
    "missing file and a wrong argument": BadCall(
        "--dataset_name rwos.jsonl --load_in_4bit",
        Exit.USAGE,
        ["--load_in_4bit: a quantized base", "error: rwos.jsonl: no such file"],
    ),
    "missing folder": BadCall(
        "--dataset_name {tmp}/none", Exit.DATA, ["none: no such file or folder"]
    ),
    "columns of other names": BadCall(
        "--dataset_name {tmp}/spells.csv",
        Exit.DATA,
        [
            "none of the 2 rows can be used, all for the same reason: row 1: has the columns spell",
            "pass --columns prompt=COLUMN completion=COLUMN, or edit PROMPT_AND_ANSWER in",
            "llama.py",
        ],
    ),
    "a role that there is not": BadCall(
        "--columns promt=spell",
        Exit.USAGE,
        ["no such role; the roles are", "did you mean prompt=spell?"],
    ),
    "a column that there is not": BadCall(
        "--dataset_name {tmp}/spells.csv --columns prompt=spel completion=letters",
        Exit.DATA,
        ["has no column spel, which --columns names as prompt: did you mean spell?"],
    ),
    "rows that are all too long": BadCall(
        "--dataset_name {tmp}/two.jsonl --max_length 5",
        Exit.DATA,
        ["has no answer within --max_length 5: raise --max_length, the longest prompt has"],
    ),
    "empty file": BadCall(
        "--dataset_name {tmp}/nothing.jsonl", Exit.DATA, ["nothing.jsonl: the file is empty"]
    ),
    "row that is not JSON": BadCall(
        "--dataset_name {tmp}/bad.jsonl", Exit.DATA, ["bad.jsonl, line 2", "not JSON"]
    ),
    "unknown split": BadCall(
        "--dataset_name {tiny}/data --dataset_train_split none", Exit.DATA, ["none"]
    ),
    "unknown flag": BadCall(
        "--learning_rat 1", Exit.USAGE, ["--learning_rat", "did you mean --learning_rate"]
    ),
    "value of the wrong type": BadCall("--max_steps many", Exit.USAGE, ["--max_steps", "many"]),
    "values out of range, all at once": BadCall(
        "--learning_rate -1 --lora_r 0 --lora_dropout 1",
        Exit.USAGE,
        ["--learning_rate -1.0", "--lora_r 0", "--lora_dropout 1.0"],
    ),
    "checkpoints that cannot be": BadCall(
        "--save_steps -1 --save_total_limit 0 --resume_from_checkpoint {tmp}/none "
        "--allow_change sede --ddp_timeout 0",
        Exit.USAGE,
        [
            "--save_steps -1: must be 0 or more",
            "--save_total_limit 0",
            "neither auto nor none nor a folder",
            "--allow_change sede",
            "--ddp_timeout 0",
        ],
    ),
    "no such choice": BadCall("--optim adam", Exit.USAGE, ["--optim", "adamw_torch_fused"]),
    "no such model folder": BadCall(
        "--model_name_or_path {tmp}/none", Exit.USAGE, ["none: no such folder"]
    ),
    "model folder without config": BadCall(
        "--model_name_or_path {tmp}", Exit.USAGE, ["no config.json"]
    ),
    "model folder without tokenizer": BadCall(
        "--model_name_or_path {tmp}/model",
        Exit.USAGE,
        ["model: no tokenizer in this folder: copy tokenizer.json and tokenizer_config.json"],
    ),
    "model folder without weights": BadCall(
        "--model_name_or_path {tmp}/short", Exit.USAGE, ["short: no weights in it: copy"]
    ),
    "rows longer than a table of positions, in a dry run": BadCall(
        "--model_name_or_path {tmp}/short --dry_run",
        Exit.USAGE,
        ["tokens, but the model has positions for 4: use --max_length 4"],
    ),
    "model of another kind": BadCall(
        "--model_name_or_path {tmp}/bert",
        Exit.USAGE,
        ["a model of type bert is no causal language model: recipes/bert.py"],
    ),
    "five combinations that cannot be": BadCall(
        "--load_in_4bit --load_in_8bit --dtype float16 --attn_implementation flash_attention_2 "
        "--optim paged_adamw_8bit",
        Exit.USAGE,
        ["choose one", "add --use_peft", "--dtype float32", "use sdpa", "adamw_8bit"],
    ),
    "a 4-bit base without adapters": BadCall(
        "--load_in_4bit", Exit.USAGE, ["--load_in_4bit: a quantized base can only be trained"]
    ),
    "layers that the model has not": BadCall(
        "--use_peft --lora_target_modules q_prj",
        Exit.USAGE,
        ["--lora_target_modules q_prj: no layer", "did you mean q_proj?", "down_proj, gate_proj"],
    ),
    "hub kernel without a GPU": BadCall(
        "--attn_implementation kernels-community/flash-attn2", Exit.USAGE, ["use sdpa"]
    ),
    "flex attention without a GPU": BadCall(
        "--attn_implementation flex_attention", Exit.USAGE, ["use sdpa"]
    ),
    "no such attention": BadCall("--attn_implementation quick", Exit.USAGE, ["quick"]),
    "output folder that is a file": BadCall(
        "--output_dir {tmp}/rows.jsonl", Exit.USAGE, ["rows.jsonl", "file"]
    ),
    "output folder inside of a file": BadCall(
        "--output_dir {tmp}/rows.jsonl/run",
        Exit.CANNOT_WRITE,
        ["rows.jsonl/run: Not a directory"],
    ),
    "output folder that cannot be": BadCall(
        "--output_dir /proc/nope/x", Exit.CANNOT_WRITE, ["No such file or directory"]
    ),
    "output folder with the base model": BadCall(
        "--output_dir {tiny}/model --dry_run",
        Exit.USAGE,
        ["/model: is the folder of --model_name_or_path", "choose another --output_dir"],
    ),
    "output folder with another model": BadCall(
        "--output_dir {tmp}/model",
        Exit.USAGE,
        ["model: has a model (config.json, ", "but no run.json", "choose another --output_dir"],
    ),
}
WITHOUT_STATUS = (
    "rows longer than a table of positions, in a dry run",
    "output folder with the base model",
    "output folder with another model",
    "output folder that is a file",
    "output folder inside of a file",
    "output folder that cannot be",
)


@pytest.fixture
def inputs(tiny, tmp_path):
    """A folder with rows, models that lack something, and the status of an earlier run."""
    (tmp_path / "rows.jsonl").write_text(GOOD)
    (tmp_path / "two.jsonl").write_text(f"{GOOD}\n{GOOD}\n")
    (tmp_path / "spells.csv").write_text("spell,letters\nlamp,l-a-m-p\nox,o-x\n")
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text(WITH_BAD_LINE)
    no_tokens = shutil.ignore_patterns("*token*")
    shutil.copytree(tiny / "model", tmp_path / "model", ignore=no_tokens)
    no_weights = shutil.ignore_patterns("*.safetensors", "config.json")
    for config in (GPT2Config(vocab_size=512, n_positions=4), BertConfig(vocab_size=512)):
        name = "short" if config.model_type == "gpt2" else config.model_type
        shutil.copytree(tiny / "model", tmp_path / name, ignore=no_weights)
        config.save_pretrained(tmp_path / name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "stopped", "exit_code": 75}')
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_ends_with_a_message(name, tiny, inputs):
    call = CALLS[name]
    words = [word.format(tmp=inputs, tiny=tiny) for word in call.words.split()]
    defaults = {
        "--model_name_or_path": tiny / "model",
        "--dataset_name": inputs / "rows.jsonl",
        "--output_dir": inputs / "run",
    }
    for flag, value in defaults.items():
        if flag not in words:
            words += [flag, value]
    done = recipe(*words)
    message = done.output[done.output.index("error: ") :]
    assert done.returncode == call.code, done.output
    assert "Traceback" not in done.output and "Errno" not in message
    assert len(message.splitlines()) <= 6, message
    assert all(part in message for part in call.says), message
    if name not in WITHOUT_STATUS:
        status = json.loads((inputs / "run" / "status.json").read_text())
        assert status["exit_code"] == call.code


@pytest.mark.cold("as a user starts it by hand")
def test_skip_bad_rows_counts_them(tiny, tmp_path):
    (tmp_path / "rows.jsonl").write_text(WITH_BAD_LINE)
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    words += ["--output_dir", tmp_path / "run", "--max_steps", 1]
    done = recipe(*words, "--skip_bad_rows")
    assert done.returncode == 0, done.output
    assert "2, 0 truncated to --max_length, 1 left out" in done.output


@pytest.mark.cold("as a user starts it by hand")
def test_without_a_hub_the_message_names_the_offline_commands(tmp_path):
    done = recipe("--output_dir", tmp_path / "run")  # HF_HUB_OFFLINE is set for all tests
    assert done.returncode == 69, done.output
    assert "make_tiny.py" in done.output and "Traceback" not in done.output
