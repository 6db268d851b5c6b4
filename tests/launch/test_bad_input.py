"""Wrong input ends the process with 64 (usage) or 65 (data) and a few lines, never a traceback.

All kinds of bad rows and files, one by one: tests/unit/components/test_rows.py."""

import json
import shutil

import pytest

from launching import recipe

GOOD = json.dumps({"prompt": "Spell the word lamp.", "completion": "l-a-m-p"})
USAGE, DATA = 64, 65


def file(tmp_path, text, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ["--dataset_name", path]


def without_tokenizer(tmp_path, tiny):
    shutil.copytree(tiny / "model", tmp_path / "model")
    for path in (tmp_path / "model").glob("*token*"):
        path.unlink()
    return ["--model_name_or_path", tmp_path / "model"]


CASES = {  # name: (arguments from tmp_path and tiny, exit code, what the message says)
    "missing file": (
        lambda tmp, tiny: ["--dataset_name", tmp / "none.jsonl"],
        DATA,
        ["none.jsonl", "No such file"],
    ),
    "empty file": (lambda tmp, tiny: file(tmp, ""), DATA, ["rows.jsonl", "empty"]),
    "row that is not JSON": (
        lambda tmp, tiny: file(tmp, f'{GOOD}\n{{"prompt": "a", \n{GOOD}\n'),
        DATA,
        ["rows.jsonl, line 2", "not JSON"],
    ),
    "unknown split": (
        lambda tmp, tiny: ["--dataset_name", tiny / "data", "--dataset_train_split", "none"],
        DATA,
        ["none"],
    ),
    "unknown flag": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--learning_rat", "1"],
        USAGE,
        ["--learning_rat", "did you mean --learning_rate"],
    ),
    "value of the wrong type": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--max_steps", "many"],
        USAGE,
        ["--max_steps", "many"],
    ),
    "values out of range, all at once": (
        lambda tmp, tiny: [
            *file(tmp, GOOD),
            "--learning_rate",
            "-1",
            "--lora_r",
            "0",
            "--lora_dropout",
            "1",
        ],
        USAGE,
        ["--learning_rate -1.0", "--lora_r 0", "--lora_dropout 1.0"],
    ),
    "checkpoints that cannot be": (
        lambda tmp, tiny: [
            *file(tmp, GOOD),
            "--save_steps",
            "-1",
            "--save_total_limit",
            "0",
            "--resume_from_checkpoint",
            tmp / "none",
            "--allow_change",
            "sede",
            "--ddp_timeout",
            "0",
        ],
        USAGE,
        [
            "--save_steps -1: must be 0 or more",
            "--save_total_limit 0",
            "neither auto nor none nor a folder",
            "--allow_change sede",
            "--ddp_timeout 0",
        ],
    ),
    "no such choice": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--optim", "adam"],
        USAGE,
        ["--optim", "adamw_torch_fused"],
    ),
    "no such model folder": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--model_name_or_path", f"{tmp}/none"],
        USAGE,
        ["none"],
    ),
    "model folder without config": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--model_name_or_path", tmp],
        USAGE,
        ["no config.json"],
    ),
    "model folder without tokenizer": (
        lambda tmp, tiny: [*file(tmp, GOOD), *without_tokenizer(tmp, tiny)],
        USAGE,
        ["tokenizer"],
    ),
    "five combinations that cannot be": (
        lambda tmp, tiny: [
            *file(tmp, GOOD),
            "--load_in_4bit",
            "--load_in_8bit",
            "--dtype",
            "float16",
            "--attn_implementation",
            "flash_attention_2",
            "--optim",
            "paged_adamw_8bit",
        ],
        USAGE,
        ["choose one", "add --use_peft", "--dtype float32", "use sdpa", "adamw_8bit"],
    ),
    "layers that the model has not": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--use_peft", "--lora_target_modules", "q_porj"],
        USAGE,
        ["--lora_target_modules", "q_porj"],
    ),
    "hub kernel without a GPU": (
        lambda tmp, tiny: [
            *file(tmp, GOOD),
            "--attn_implementation",
            "kernels-community/flash-attn2",
        ],
        USAGE,
        ["use sdpa"],
    ),
    "flex attention without a GPU": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--attn_implementation", "flex_attention"],
        USAGE,
        ["use sdpa"],
    ),
    "no such attention": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--attn_implementation", "quick"],
        USAGE,
        ["quick"],
    ),
    "output folder that is a file": (
        lambda tmp, tiny: [*file(tmp, GOOD), "--output_dir", tmp / "rows.jsonl"],
        USAGE,
        ["rows.jsonl", "file"],
    ),
}
WITHOUT_STATUS = ("output folder that is a file",)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_with_a_message(name, tiny, tmp_path):
    arguments, code, words = CASES[name]
    arguments = arguments(tmp_path, tiny)
    defaults = {"--model_name_or_path": tiny / "model", "--output_dir": tmp_path / "run"}
    for flag, value in defaults.items():
        arguments += [] if flag in arguments else [flag, value]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(
        '{"state": "stopped", "exit_code": 75}'
    )  # of the run before
    done = recipe(*arguments)
    message = done.output[done.output.index("error: ") :]
    assert done.returncode == code, done.output
    assert "Traceback" not in done.output and len(message.splitlines()) <= 6, message
    assert all(word in message for word in words), message
    if name not in WITHOUT_STATUS:
        assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == code


@pytest.mark.cold("as a user starts it by hand")
def test_skip_bad_rows_counts_them(tiny, tmp_path):
    rows = file(tmp_path, f'{GOOD}\n{{"prompt": "a", \n{GOOD}\n')
    model = [
        "--model_name_or_path",
        tiny / "model",
        "--output_dir",
        tmp_path / "run",
        "--max_steps",
        1,
    ]
    done = recipe(*rows, *model, "--skip_bad_rows")
    assert done.returncode == 0, done.output
    assert "2, 0 truncated to --max_length, 1 left out" in done.output


@pytest.mark.cold("as a user starts it by hand")
def test_without_a_hub_the_message_names_the_offline_commands(tmp_path):
    done = recipe("--output_dir", tmp_path / "run")  # HF_HUB_OFFLINE is set for all tests
    assert done.returncode == 69, done.output
    assert "make_tiny.py" in done.output and "Traceback" not in done.output
