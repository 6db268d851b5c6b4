# SPDX-License-Identifier: Apache-2.0
"""The prompts of a receipt come from the rows of the run, and a receipt says which."""

import dataclasses
import json

import pytest
from transformers import AutoTokenizer, PretrainedConfig

from components.chat_template import ChatTemplate
from merging import prompts


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def reader(tokenizer):
    return prompts.Reader(tokenizer, ChatTemplate(tokenizer), {})


@pytest.fixture
def texts(tokenizer):
    """A reader of raw text, for a model without a chat template."""
    return prompts.Reader(tokenizer, None, {"text": "body"})


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(found):
    return [prompt.conversation.messages[-1]["content"] for prompt in found.items]


GOOD = [{"prompt": f"Spell {word}.", "completion": word} for word in ("lamp", "river")]


def test_evaluation_rows_come_before_training_rows_and_questions(reader, tmp_path):
    arguments = {
        "eval_dataset_name": str(write_rows(tmp_path / "eval.jsonl", GOOD[0])),
        "dataset_name": [str(write_rows(tmp_path / "train.jsonl", GOOD[1]))],
    }
    found = prompts.collect(reader, None, arguments, 50)
    assert asked(found)[:2] == ["Spell lamp.", "Spell river."] and len(found.items) == 50
    assert found.sources == {
        "evaluation rows of the run": 1,
        "training rows of the run, not held out": 1,
        "simple questions, made here": 48,
    }
    assert len(set(asked(found))) == 50


def test_rows_on_the_hub_or_gone_are_left_out(reader, tmp_path):
    arguments = {"eval_dataset_name": "owner/rows", "dataset_name": str(tmp_path / "gone.jsonl")}
    assert prompts.collect(reader, None, arguments, 3).sources == {"simple questions, made here": 3}


def test_a_bad_row_of_the_run_is_skipped_but_one_of_the_user_is_named(reader, tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", GOOD[0], {"prompt": 1}, GOOD[1])
    found = prompts.collect(reader, None, {"dataset_name": str(path)}, 2)
    assert asked(found) == ["Spell lamp.", "Spell river."]
    with pytest.raises(SystemExit, match="65"):
        prompts.collect(reader, path, {}, 3)
    assert "rows.jsonl, line 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none.jsonl", "empty.jsonl"])
def test_a_file_without_rows_is_named(name, reader, tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit, match="65"):
        prompts.collect(reader, tmp_path / name, {}, 3)
    assert name in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_left_out(reader, tmp_path):
    long = {"prompt": "far " * 2000, "completion": "b"}
    path = write_rows(tmp_path / "rows.jsonl", long, GOOD[0])
    found = prompts.collect(reader, path, {}, 1)
    assert asked(found) == ["Spell lamp."]


def test_the_prompt_of_a_preference_is_one_too(reader, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi?", "chosen": "a", "rejected": "b"})
    assert asked(prompts.collect(reader, path, {}, 1)) == ["Hi?"]


def test_without_a_template_a_text_is_continued(texts, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"body": "Once upon a time. " * 50})
    (prompt,) = prompts.collect(texts, path, {}, 1).items
    assert prompt.render(None).startswith("Once upon") and len(prompt.render(None)) <= 200
    made = prompts.collect(texts, None, {}, 2)
    assert made.items[0].render(None) == "Describe a lamp in one sentence."


def test_a_model_for_which_every_prompt_is_too_long_is_told(reader, capsys):
    with pytest.raises(SystemExit, match="65"):
        prompts.collect(dataclasses.replace(reader, longest=3), None, {}, 5)
    assert "no prompt has at most 3 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("positions", "longest"), [(None, prompts.LONGEST), (100_000, prompts.LONGEST), (100, 84)]
)
def test_a_prompt_leaves_room_for_the_answer(positions, longest):
    config = PretrainedConfig(max_position_embeddings=positions)
    assert prompts.longest_prompt(config, 16) == longest


def test_a_model_without_room_for_an_answer_is_told(capsys):
    with pytest.raises(SystemExit, match="64"):
        prompts.longest_prompt(PretrainedConfig(max_position_embeddings=16), 16)
    assert "--max_new_tokens 16: the model has 16 positions" in capsys.readouterr().err


def test_prompts_beyond_the_longest_are_left_out(reader, tmp_path):
    short = dataclasses.replace(reader, longest=60)
    path = write_rows(tmp_path / "rows.jsonl", GOOD[0], {"prompt": "a" * 200, "completion": "b"})
    assert len(list(short.read(path, skip_bad_rows=False))) == 1
    assert len(list(reader.read(path, skip_bad_rows=False))) == 2
