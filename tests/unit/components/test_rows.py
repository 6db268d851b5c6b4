# SPDX-License-Identifier: Apache-2.0
"""Every bad row is named with its file and line, and rows that are held out are held out.

tests/launch/test_golden_rows.py has what comes of each file of row_files.py.
"""

import json
from dataclasses import replace
from functools import partial

import datasets
import pytest
import xxhash
from transformers import AutoTokenizer

from components import fingerprints
from components.mixture import read_splits
from components.rows import attempt_rows, longest_row, open_splits
from core import chat
from core.chat import ChatTemplate, check_nothing_is_lost, read_conversation
from example_arguments import MixtureFlags, RowFlags
from row_files import (
    ASSISTANT,
    BAD_LINES,
    GOOD,
    USER,
    conversation,
    row,
)

FORMATS = {"prompt": "completion", "instruction": "output", "question": "answer"}
MAX_LENGTH = 200
ALL_BAD_LINES = b"\n".join(
    GOOD.encode()
    + b"\n"
    + (bad.content if isinstance(bad.content, bytes) else bad.content.encode())
    for bad in BAD_LINES.values()
)


def tokenize(row, tokenizer, max_length=MAX_LENGTH):
    """Prepare a conversation as simply as can be: all after the first message is the answer."""
    conversation = read_conversation(row, FORMATS)
    template = ChatTemplate(tokenizer)
    check_nothing_is_lost(row, conversation, template.render(conversation), template)
    messages = conversation.messages
    question = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False).encode().decode()
    prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(prompt) >= max_length:
        raise ValueError(
            f"has no answer within --max_length {max_length}: {len(prompt)} tokens are prompt"
        )
    return {
        "input_ids": tokens[:max_length],
        "truncated": len(tokens) > max_length,
        "whole_length": len(tokens),
        "length": min(len(tokens), max_length),
        "hash": xxhash.xxh3_64_intdigest(json.dumps(tokens).encode()) >> 1,
    }


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of datasets' cache, empty at first."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def load(tmp_path, tokenizer):
    """A function that writes files, and reads them with the given arguments."""
    (tmp_path / "data").mkdir()

    def load_files(files, evaluate=False, prepare=None, **changes):
        for name, content in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        alone = [name.split("/")[0] for name in files if name.startswith("rows")]
        # The folder, without a file of that name
        args = MixtureFlags([str(tmp_path / "data" / "".join(alone))])
        prepare = prepare or partial(tokenize, tokenizer=tokenizer)
        return read_splits(replace(args, **changes), prepare, evaluate=evaluate)

    return load_files


@pytest.fixture
def problems_of(load, capsys):
    """A function that does the same, expects 65 and returns the lines of the message."""

    def stops(*arguments, **options):
        with pytest.raises(SystemExit) as stopped:
            load(*arguments, **options)
        printed = capsys.readouterr().err.splitlines()
        lines = [line for line in printed if line.startswith("error: ")]
        assert stopped.value.code == 65 and 1 <= len(lines) <= 6
        assert all(len(line) < 600 for line in lines)
        return lines

    return stops


def numbers_of(rows):
    return rows.dataset["row"][:].tolist()


# ---- Bad and good files ----
def test_the_problem_of_a_bad_line_is_one_line_that_can_be_printed(tmp_path, tokenizer):
    """All are in one file, each behind a good line."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ALL_BAD_LINES)
    split, _ = open_splits(str(path), RowFlags(str(path)), evaluate=False)
    problems = attempt_rows(split, partial(tokenize, tokenizer=tokenizer), None)["problem"][:]
    assert len(problems) == 2 * len(BAD_LINES) and set(problems[::2]) == {""}
    for name, problem in zip(BAD_LINES, problems[1::2], strict=True):
        assert problem.splitlines() == [problem] and problem.encode(), name
        assert len(problem) <= 300, name


@pytest.mark.parametrize(
    ("files", "places"),
    [
        ({"rows.jsonl": f"{GOOD}\n{{\n\n{GOOD}"}, ["rows.jsonl, line 2", "1 of 4 lines"]),
        ({"rows.jsonl": "{\n" * 7}, ["rows.jsonl", "line 1"]),
        ({"rows.jsonl": f"{{\n{{\n{{\n{GOOD}\n{{\n"}, ["line 1", "line 3", "4 of 5"]),
        ({"train.jsonl": f"{GOOD}\n{{\n"}, ["train.jsonl, line 2"]),
        ({"rows.csv": "prompt;completion\na;b\n"}, ["rows.csv", "row 1"]),
        ({"rows.csv": "my question,reply\na,b\n"}, ["rows.csv", "--columns"]),
        ({"rows.jsonl": row("a" * 500)}, ["line 1", "--max_length"]),
        ({"rows.jsonl": ""}, ["rows.jsonl"]),
        ({"rows.txt": GOOD}, ["rows.txt"]),
        ({"notes.txt": "a"}, ["data"]),
    ],
    ids=str,
)
def test_a_bad_row_or_file_is_named(files, places, problems_of):
    told = "\n".join(problems_of(files))
    assert all(place in told for place in places), told


# ---- Rows to evaluate on ----
def test_evaluation_rows_are_read_with_the_same_care(load, problems_of, tmp_path):
    files = {"train.jsonl": f'{GOOD}\n{{"question": "a"', "test.jsonl": f"{GOOD}\n{{\n"}
    rows, eval_rows = load(files, evaluate=True, skip_bad_rows=True)
    assert numbers_of(rows) == numbers_of(eval_rows) == [1]
    assert eval_rows.notes.endswith(" 1 left out")
    assert "test.jsonl, line 2: " in problems_of({"train.jsonl": GOOD}, evaluate=True)[0]
    missing = str(tmp_path / "held_out.jsonl")
    problem = problems_of({}, evaluate=True, eval_dataset_name=missing)[0]
    assert "held_out.jsonl: no such file" in problem


# ---- What prepares a row ----
@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{% for message in messages %}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_the_template_raises_is_a_problem_of_the_row(
    template, problems_of, tokenizer, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    (problem,) = problems_of({"rows.jsonl": GOOD})
    assert "rows.jsonl, line 1" in problem


@pytest.mark.parametrize("skip_bad_rows", [False, True])
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.json"])
def test_a_fault_of_what_prepares_is_no_bad_row_and_names_its_place(load, skip_bad_rows, file):
    """Else an edit with a misspelt name would leave out every row that reaches it."""

    def misspelt(row):
        return {"length": len(row["prompt"]), "hash": 0} if row["prompt"] == "a" else row["promt"]

    content = f"{row()}\n{GOOD}\n"
    with pytest.raises(KeyError) as raised:
        load({file: content}, prepare=misspelt, skip_bad_rows=skip_bad_rows)
    (note,) = raised.value.__notes__
    unit = "line" if file.endswith("l") else "row"
    assert note.endswith(f"{file}, {unit} 2")


def test_an_answer_cut_short_is_counted(load, tokenizer):
    question = [{"role": "user", "content": json.loads(GOOD)["prompt"]}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    short = partial(tokenize, tokenizer=tokenizer, max_length=len(prompt) + 1)
    rows, _ = load({"rows.jsonl": GOOD}, prepare=short)
    assert rows.notes == "1, 1 truncated to --max_length, 0 left out"


# ---- What is kept ----
def test_rows_are_prepared_once(load, cache, tokenizer):
    files = {"train.jsonl": f"{GOOD}\n{{\n", "test.jsonl": GOOD}
    load(files, evaluate=True, skip_bad_rows=True)
    written = sorted(cache.rglob("*.arrow"))
    load({}, evaluate=True, skip_bad_rows=True)
    assert sorted(cache.rglob("*.arrow")) == written
    shorter = partial(tokenize, tokenizer=tokenizer, max_length=100)
    load({}, evaluate=True, skip_bad_rows=True, prepare=shorter)
    assert len(sorted(cache.rglob("*.arrow"))) == len(written) + 2


def test_the_cache_knows_the_rules_of_a_row(load, monkeypatch):
    """A row that was prepared before a rule was made is read again."""
    file = {"rows.jsonl": conversation(USER, {**ASSISTANT, "weight": 5})}
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "hash_of_modules", lambda folder: "before")
        patch.setattr(chat, "WEIGHTS", ())
        assert len(load(file)[0]) == 1
    with pytest.raises(SystemExit):
        load(file)


# ---- Columns of texts and labels ----
def test_texts_that_look_like_numbers_stay_texts(tmp_path):
    (tmp_path / "train.csv").write_text("report,headline,label\n007,1e3,2\n")
    args = RowFlags(str(tmp_path))
    split, _ = open_splits(args.dataset_name, args, evaluate=False, text_columns=["report"])
    assert split.dataset[0] == {"report": "007", "headline": 1000.0, "label": 2}


# ---- Rows that are held out ----
NUMBERS = "".join(f'{{"number": {number}}}\n' for number in range(1, 21))


def number_of(row):
    return {"number": row["number"], "hash": row["number"]}


@pytest.fixture
def held_out(load):
    """A function that returns the numbers trained on and those held out of the rows 1 to 20."""

    def split(share, evaluate=True, **changes):
        files = {"rows.jsonl": NUMBERS}
        train_rows, eval_rows = load(
            files, evaluate=evaluate, prepare=number_of, eval_split=share, **changes
        )
        return numbers_of(train_rows), numbers_of(eval_rows) if eval_rows else None

    return split


@pytest.mark.parametrize(("share", "number"), [(0.1, 2), (0.001, 1), (0.5, 10), (1, 1), (7, 7)])
def test_each_row_is_trained_on_or_held_out(share, number, held_out):
    trained_on, evaluated_on = held_out(share)
    assert len(evaluated_on) == number
    assert sorted(trained_on + evaluated_on) == list(range(1, 21))
    assert trained_on == sorted(trained_on) and evaluated_on == sorted(evaluated_on)


def test_the_rows_held_out_follow_from_the_seed(held_out):
    assert held_out(0.25) == held_out(5) == held_out(0.25)
    assert held_out(0.25, seed=1) != held_out(0.25)
    # Whether a run evaluates may change when it is resumed, what it trains on may not
    assert held_out(0.25, evaluate=False) == (held_out(0.25)[0], None)


def test_a_test_split_is_not_read_beside_rows_that_are_held_out(load):
    files = {"train.jsonl": NUMBERS, "test.jsonl": NUMBERS}
    _, eval_rows = load(files, evaluate=True, prepare=number_of, eval_split=3)
    assert len(eval_rows) == 3
    _, eval_rows = load({}, evaluate=True, prepare=number_of)
    assert len(eval_rows) == 20


def test_a_row_has_to_be_left_to_train_on(problems_of):
    (problem,) = problems_of({"rows.jsonl": NUMBERS}, prepare=number_of, eval_split=20)
    assert "--eval_split 20" in problem


def test_the_longest_row_may_be_one_to_evaluate_on(load):
    longer = row("Spell the word lamp.", "l-a-m-p, l-a-m-p")
    files = {"train.jsonl": f"{GOOD}\n", "test.jsonl": f"{GOOD}\n{longer}\n"}
    train_rows, eval_rows = load(files, evaluate=True)
    assert longest_row(train_rows, None) == train_rows.lengths.max()
    assert longest_row(train_rows, eval_rows) == eval_rows.lengths.max() > train_rows.lengths.max()
