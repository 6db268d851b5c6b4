# SPDX-License-Identifier: Apache-2.0
"""The commands that the planner prints can be pasted: the recipe reads each of them."""

import contextlib
import io
import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

import llama
from core.cli import parse
from planner.answer import DOES_NOT_FIT, FITS, answer
from planner.request import Request
from planner_jobs import BASE, config_of

SMALL = BASE | {"width": 128, "depth": 1, "vocab": 1000}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config_of(SMALL).save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture(scope="module")
def printed(model):
    """A function from the words of a request to the commands in the answer, unfolded, as words."""

    def printed(words="", **launcher):
        request = Request(str(model), words.split(), gpu="24GB", num_processes=4, **launcher)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert answer(request) == FITS
        lines = out.getvalue().replace("\\\n", "").splitlines()
        return [shlex.split(line) for line in lines if line.startswith("accelerate launch")]

    return printed


def read(words):
    """The launcher's and the recipe's arguments of a command, read by their own parsers."""
    launch = launch_command_parser().parse_args(words[2:])
    assert launch.training_script == "recipes/llama.py"
    return launch, parse(llama.Arguments, words=launch.training_script_args)


def test_what_was_given_is_kept(printed):
    flags = "--dataset_name my_rows.jsonl --learning-rate 3e-5 --output_dir runs/mine --packing"
    for launch, args in map(
        read, printed(f"{flags} --use_peft --lora_r 4", mixed_precision="fp16")
    ):
        assert launch.mixed_precision == "fp16" and args.use_peft and args.lora_r == 4
        assert args.dataset_name == ["my_rows.jsonl"] and args.learning_rate == 3e-5
        assert args.output_dir == "runs/mine" and args.packing


def test_where_nothing_fits_it_is_said_how_much_is_missing(model, capsys):
    assert answer(Request(str(model), ["--use_peft"], gpu="0.8GiB")) == DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "0 of " in out and "LoRA, nf4: does not fit, at least " in out
    assert "accelerate launch" not in out
