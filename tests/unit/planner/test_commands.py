# SPDX-License-Identifier: Apache-2.0
"""The commands that the planner prints can be pasted: the recipe reads each of them."""

import contextlib
import functools
import io
import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

import llama
from core.cli import parse
from planner.answer import DOES_NOT_FIT, FITS, PLACEHOLDER, answer
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

    @functools.cache
    def printed(words="", gpu="24GB", ranks=4):
        request = Request(str(model), words.split(), gpu=gpu, num_processes=ranks)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert answer(request) in (FITS, DOES_NOT_FIT)
        text = out.getvalue().replace("\\\n", "")
        lines = [line for line in text.splitlines() if line.startswith("accelerate launch")]
        return text, [shlex.split(line) for line in lines]

    return printed


def read(words):
    """The launcher's and the recipe's arguments of a command, read by their own parsers."""
    launch = launch_command_parser().parse_args(words[2:])
    assert launch.training_script == "recipes/llama.py"
    return launch, parse(llama.Arguments, words=launch.training_script_args)


def test_each_command_is_read_by_launcher_and_recipe(printed, model):
    _, found = printed()
    adapters, full = map(read, found)
    for launch, args in (adapters, full):
        assert launch.num_processes == 4
        assert args.model_name_or_path == str(model.parent)
        assert args.dataset_name == [PLACEHOLDER]
        assert args.dataset_config is None
    assert adapters[1].use_peft and adapters[1].learning_rate == 2e-4
    assert not full[1].use_peft and full[1].learning_rate == 2e-5


def test_what_was_given_is_kept(printed):
    flags = "--dataset_name my_rows.jsonl --learning-rate 3e-5 --output_dir runs/mine --packing"
    _, found = printed(flags)
    for _, args in map(read, found):
        assert args.dataset_name == ["my_rows.jsonl"] and args.learning_rate == 3e-5
        assert args.output_dir == "runs/mine" and args.packing


def test_a_change_that_lets_a_way_fit_is_complete_too(printed):
    text, found = printed(gpu="0.85GiB", ranks=1)
    assert "is enough by itself" in text and found
    for _, args in map(read, found):
        assert args.dataset_name == [PLACEHOLDER]
        assert args.learning_rate == (2e-4 if args.use_peft else 2e-5)


def test_the_order_and_the_card_are_explained(printed):
    text, _ = printed()
    assert "rule of thumb" in text and "nothing was timed" in text
    assert "--gpu 24GB counts as 22.4 GiB" in text
