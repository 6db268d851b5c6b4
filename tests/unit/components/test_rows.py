# SPDX-License-Identifier: Apache-2.0
"""Every bad file ends with 65, its name, the line or row, what is wrong and what to do;
--skip_bad_rows leaves the bad rows out and counts them; and what looks odd is read as it is meant.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from transformers import AutoTokenizer

from components import conversations, fingerprints
from components.chat_template import ChatTemplate, check_other_keys
from components.conversations import read_conversation
from components.mixture import read_splits
from components.rows import (
    Rows,
    attempt_rows,
    describe_rows,
    longest_row,
    open_splits,
    prepare_rows,
)
from example_arguments import MixtureFlags, RowFlags
from row_files import (
    ASSISTANT,
    BAD_FILES,
    BAD_LINES,
    GOOD,
    GOOD_FILES,
    USER,
    conversation,
    parquet_of,
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
    check_other_keys(row, conversation, template.render(conversation), template)
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
        args = MixtureFlags(
            [str(tmp_path / "data" / "".join(alone))]
        )  # the folder without such a file
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
@pytest.fixture(scope="module")
def problem_of(tmp_path_factory, tokenizer):
    """{name of a bad line: its problem}, where all are in one file, each behind a good line."""
    folder = tmp_path_factory.mktemp("bad_lines")
    (folder / "rows.jsonl").write_bytes(ALL_BAD_LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        split, _ = open_splits(
            str(folder / "rows.jsonl"), RowFlags(str(folder / "rows.jsonl")), evaluate=False
        )
        problems = attempt_rows(split, partial(tokenize, tokenizer=tokenizer), None)["problem"][:]
    assert len(problems) == 2 * len(BAD_LINES) and set(problems[::2]) == {""}
    return dict(zip(BAD_LINES, problems[1::2], strict=True))


@pytest.mark.parametrize("name", BAD_LINES)
def test_the_problem_of_a_bad_line_is_one_line_that_can_be_printed(name, problem_of):
    problem = problem_of[name]
    assert all(word in problem for word in BAD_LINES[name].says), problem
    assert problem.splitlines() == [problem] and problem.encode() and len(problem) <= 300


def test_bad_lines_are_named_or_left_out(load, problems_of, problem_of):
    files = {"rows.jsonl": ALL_BAD_LINES}
    number = len(BAD_LINES)
    *named, last = problems_of(files)
    assert [line.partition("rows.jsonl, line ")[2] for line in named] == [
        f"{2 * place}: {problem}" for place, problem in enumerate(list(problem_of.values())[:3], 1)
    ]
    assert f"rows.jsonl: {number} of {2 * number} lines cannot be used: raise --max_len" in last
    assert "tokens; fix the others, or leave them out with --skip_bad_rows" in last
    assert "--skip_bad_rows" in last
    rows, _ = load(files, skip_bad_rows=True)
    assert numbers_of(rows) == list(range(1, 2 * number, 2))
    assert rows.notes == f"{number}, 0 truncated to --max_length, {number} left out"


def test_blank_lines_count_as_lines_and_not_as_bad_rows(load, problems_of):
    files = {"rows.jsonl": f"{GOOD}\n{{\n\n{GOOD}"}
    first, last = problems_of(files)
    assert "rows.jsonl, line 2: is not JSON" in first and "1 of 4 lines cannot be used" in last
    rows, _ = load(files, skip_bad_rows=True)
    assert numbers_of(rows) == [1, 4]
    assert rows.notes == "2, 0 truncated to --max_length, 1 left out"


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name, load, problems_of):
    bad = BAD_FILES[name]
    message = "\n".join(problems_of(bad.files))
    assert all(word in message for word in bad.says), message
    if bad.kept is None:
        assert problems_of(bad.files, skip_bad_rows=True) == message.splitlines()
    else:
        rows, _ = load(bad.files, skip_bad_rows=True)
        assert numbers_of(rows) == bad.kept and rows.notes.startswith(f"{len(bad.kept)}, ")


@pytest.mark.parametrize("name", GOOD_FILES)
def test_what_looks_odd_is_read_as_it_is_meant(name, load, tokenizer):
    good = GOOD_FILES[name]
    rows, _ = load(good.files)
    assert numbers_of(rows) == [number for number, _, _ in good.rows]
    assert " 0 left out" in rows.notes
    for found, (_, prompt, answer) in zip(rows.dataset, good.rows, strict=True):
        wanted = tokenize({"prompt": prompt, "completion": answer}, tokenizer)
        assert found["input_ids"].tolist() == wanted["input_ids"]


def test_more_bad_rows_than_are_written_at_a_time_may_come_first(load):
    bad = 1100  # datasets takes the types of the columns from the first 1,000 rows
    rows, _ = load({"rows.jsonl": "{\n" * bad + GOOD}, skip_bad_rows=True)
    assert numbers_of(rows) == [bad + 1] and rows.notes.endswith(f" {bad} left out")


def test_an_unreadable_file_is_named(problems_of, monkeypatch):
    def refuse(*arguments, **options):  # root may read all files
        raise PermissionError(13, "Permission denied", "rows.jsonl")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    assert "rows.jsonl: Permission denied" in problems_of({"rows.jsonl": GOOD})[0]


def test_without_the_hub_a_rehearsal_is_offered(load, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(SystemExit, match="69"):
        load({}, dataset_name=["somebody/something"])
    message = capsys.readouterr().err
    assert "somebody/something: Couldn't reach the Hub" in message and "make_tiny" in message


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


def test_without_evaluation_rows_the_training_rows_are_not_read_anew_for_them(load, tmp_path):
    for source in ("", "train.jsonl"):  # a folder, a file
        name = str(tmp_path / "data" / source)
        files = {"train.jsonl": f"{GOOD}\n{{\n"}
        rows, eval_rows = load(files, evaluate=True, skip_bad_rows=True, dataset_name=[name])
        assert numbers_of(rows) == [1] and eval_rows is None
        assert describe_rows(rows, eval_rows)["eval rows"] == "none"


def test_evaluation_rows_are_not_opened_where_they_are_not_wanted(load):
    rows, eval_rows = load({"train.jsonl": GOOD, "test.jsonl": "{"}, evaluate=False)
    assert numbers_of(rows) == [1] and eval_rows is None


# ---- What prepares a row ----
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "TemplateError: Roles must alternate"),
        ("{{ messages[0].name.first }}", "UndefinedError"),
        ("{% for message in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
    ids=["role order", "unknown name", "no template", "arithmetic"],
)
def test_what_the_template_raises_is_a_problem_of_the_row(
    template, says, problems_of, tokenizer, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    prepare = partial(tokenize, tokenizer=tokenizer)
    (problem,) = problems_of({"rows.jsonl": GOOD}, prepare=prepare)
    assert "rows.jsonl, line 1, the only one: " in problem and says in problem, problem


def test_an_answer_cut_to_nothing_is_a_problem_and_one_cut_short_is_not(
    load, problems_of, tokenizer
):
    question = [{"role": "user", "content": json.loads(GOOD)["prompt"]}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    length = len(prompt)
    none = partial(tokenize, tokenizer=tokenizer, max_length=length)
    (problem,) = problems_of({"rows.jsonl": GOOD}, prepare=none)
    advice = f"raise --max_length, the longest prompt has {length} tokens"
    assert f"within --max_length {length}: {advice}" in problem
    short = partial(tokenize, tokenizer=tokenizer, max_length=length + 1)
    rows, _ = load({"rows.jsonl": GOOD}, prepare=short)
    assert rows.notes == "1, 1 truncated to --max_length, 0 left out"


def test_left_out_rows_do_not_count_as_truncated(load, tokenizer):
    prepare = partial(tokenize, tokenizer=tokenizer, max_length=40)
    long = row("a", "b" * 100)
    rows, _ = load({"rows.jsonl": f"{long}\n{{\n{{\n"}, prepare=prepare, skip_bad_rows=True)
    assert rows.notes == "1, 1 truncated to --max_length, 2 left out"


def first_letter(row):
    return {"letter": row["prompt"][0]}


def test_rows_need_not_be_tokens(load):
    rows, _ = load({"rows.jsonl": f"{GOOD}\n{row('')}"}, prepare=first_letter, skip_bad_rows=True)
    assert rows.notes == "1, 1 left out; not read: completion"
    assert rows.dataset["letter"][:].tolist() == ["S"]


# ---- Where no row can be used ----
SAME_REASON = "can be used, all for the same reason: "


def test_where_all_rows_lack_columns_one_line_has_the_fix(problems_of, tmp_path, monkeypatch):
    file = tmp_path / "data" / "rows.csv"
    monkeypatch.chdir(Path(__file__).parent)
    assert problems_of({"rows.csv": "my question,reply\na,b\nc,d\n"}) == [
        f"error: {file}: none of the 2 rows {SAME_REASON}row 1: has the columns my "
        "question, reply; needs messages | prompt, completion | instruction, output | question, "
        "answer: pass --columns 'prompt=my question' completion=reply, or edit PROMPT_AND_ANSWER "
        "in test_rows.py"
    ]


def test_where_all_rows_are_too_long_the_longest_is_named(problems_of, tmp_path, tokenizer):
    file = tmp_path / "data" / "rows.jsonl"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a" * 600}], add_generation_prompt=True, return_dict=False
    )
    assert problems_of({"rows.jsonl": f"{row('a' * 500)}\n\n{row('a' * 600)}\n"}) == [
        f"error: {file}: none of the 2 lines {SAME_REASON}line 1: has no answer within "
        f"--max_length 200: raise --max_length, the longest prompt has {len(prompt)} tokens"
    ]


def test_where_all_rows_have_tools_it_is_told_once(problems_of, tmp_path):
    file = tmp_path / "data" / "rows.jsonl"
    lines = {"rows.jsonl": f"{row(tools=['a'])}\n" * 3}
    assert problems_of(lines, skip_bad_rows=True) == [
        f"error: {file}: none of the 3 lines {SAME_REASON}line 1: has tools that are not a list of "
        "functions, each with a name and parameters as a JSON schema: ['a']"
    ]


def test_where_all_rows_fail_and_not_alike_nobody_is_advised_to_leave_them_out(problems_of):
    lines = problems_of({"rows.jsonl": f"{{\n{row('a', 5)}\n"})
    assert len(lines) == 3
    assert lines[-1].endswith("rows.jsonl: none of the 2 lines can be used: fix them")


# ---- What nothing reads ----
def test_columns_and_keys_that_nothing_reads_are_named(load):
    answer = ASSISTANT | {"id": "x7"}
    lines = [row(source="web", score=1), row(source="web"), conversation(USER, answer)]
    rows, _ = load({"rows.jsonl": "\n".join(lines)})
    unread = "source in 2 rows, score in 1 rows, id (of messages) in 1 rows"
    assert rows.notes.endswith(f"; not read: {unread}")
    rows, _ = load({"rows.csv": "prompt,completion,source\na,b,web\nc,d,web\n"})
    assert rows.notes == "2, 0 truncated to --max_length, 0 left out; not read: source"
    nulls = parquet_of(prompt=["a"], completion=["b"], tools=pa.nulls(1), messages=pa.nulls(1))
    rows, _ = load({"rows.parquet": nulls})
    assert "not read" not in rows.notes  # null is as if absent


def test_only_the_training_rows_tell_it(load):
    rows, eval_rows = load({"train.jsonl": row(id=1), "test.jsonl": row(id=1)}, evaluate=True)
    assert "not read: id" in rows.notes and "not read" not in eval_rows.notes


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
    file = {"rows.jsonl": row(tools=[5])}
    read = fingerprints.read_definitions

    def read_without_the_rule(path):
        found = read(path)
        if path.name == "conversations.py":
            return found | {"TOOL_COLUMNS": ast.parse("TOOL_COLUMNS = ()").body}
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "read_definitions", read_without_the_rule)
        patch.setattr(conversations, "TOOL_COLUMNS", ())
        assert len(load(file)[0]) == 1
    with pytest.raises(SystemExit):
        load(file)


def test_rows_know_their_lengths_places_and_hash(load, tmp_path):
    rows, _ = load({"rows.jsonl": f"{GOOD}\n\n{row()}\n"})
    assert isinstance(rows, Rows) and len(rows) == 2
    assert rows.fingerprint == xxhash.xxh3_128_hexdigest(rows.column("hash").tobytes())
    assert rows.lengths[:].tolist() == [len(ids) for ids in rows.dataset["input_ids"]]
    assert rows.place(1) == f"{tmp_path / 'data' / 'rows.jsonl'}, line 3"
    again, _ = load({"rows.jsonl": f"{GOOD}\n{row()}\n"})
    other, _ = load({"rows.jsonl": f"{row()}\n{GOOD}\n"})
    assert again.fingerprint == rows.fingerprint != other.fingerprint
    hashes = rows.dataset["hash"][:]
    assert rows.fingerprint == xxhash.xxh3_128_hexdigest(np.asarray(hashes).tobytes())


def test_two_limits_are_both_named(load, tmp_path, tokenizer):
    args = MixtureFlags([str(tmp_path / "data")])
    load({"train.jsonl": GOOD})
    limits = ["max_source_length", "max_target_length"]
    prepare = partial(tokenize, tokenizer=tokenizer)
    rows, _ = read_splits(args, prepare, evaluate=False, limits=limits)
    assert "0 truncated to --max_source_length and --max_target_length," in rows.notes


# ---- Columns of texts and labels ----
def test_texts_that_look_like_numbers_stay_texts(tmp_path):
    (tmp_path / "train.csv").write_text("report,headline,label\n007,1e3,2\n")
    args = RowFlags(str(tmp_path))
    split, _ = open_splits(args.dataset_name, args, evaluate=False, text_columns=["report"])
    assert split.dataset[0] == {"report": "007", "headline": 1000.0, "label": 2}


def test_numbers_in_pairs_of_answers_are_texts(tmp_path):
    (tmp_path / "train.csv").write_text("prompt,chosen,rejected\n1 + 1 =,2,3\n")
    split, _ = open_splits(str(tmp_path), RowFlags(str(tmp_path)), evaluate=False)
    assert split.dataset[0] == {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}


def test_a_data_set_that_numbers_its_classes_tells_their_names(tmp_path):
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"label": [1, 0]}, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    split, _ = open_splits(str(tmp_path), RowFlags(str(tmp_path)), evaluate=False)
    assert split.class_names("label") == ["no", "yes"] and split.class_names("text") is None


def test_a_split_can_be_prepared_by_itself(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text(GOOD)
    args = RowFlags(str(tmp_path))
    split, _ = open_splits(args.dataset_name, args, evaluate=False)
    assert isinstance(split.dataset[0], Mapping) and split.is_training
    rows = prepare_rows(split, partial(tokenize, tokenizer=tokenizer), args)
    assert numbers_of(rows) == [1]


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


def test_the_summary_says_how_many_rows_are_held_out(load):
    files = {"rows.jsonl": NUMBERS}
    train_rows, eval_rows = load(files, evaluate=True, prepare=number_of, eval_split=0.1)
    assert train_rows.notes == "20, 0 left out; 2 of these are held out (--eval_split)"
    assert eval_rows.notes == "2 held out of the training rows (--eval_split)"
    assert train_rows.place(0).endswith("rows.jsonl, line 1")


def test_a_test_split_is_not_read_beside_rows_that_are_held_out(load):
    files = {"train.jsonl": NUMBERS, "test.jsonl": NUMBERS}
    _, eval_rows = load(files, evaluate=True, prepare=number_of, eval_split=3)
    assert len(eval_rows) == 3
    _, eval_rows = load({}, evaluate=True, prepare=number_of)
    assert len(eval_rows) == 20


def test_a_row_has_to_be_left_to_train_on(problems_of):
    (problem,) = problems_of({"rows.jsonl": NUMBERS}, prepare=number_of, eval_split=20)
    assert problem == "error: --eval_split 20: leaves none of the 20 rows to train on"


def test_the_longest_row_may_be_one_to_evaluate_on(load):
    longer = row("Spell the word lamp.", "l-a-m-p, l-a-m-p")
    files = {"train.jsonl": f"{GOOD}\n", "test.jsonl": f"{GOOD}\n{longer}\n"}
    train_rows, eval_rows = load(files, evaluate=True)
    assert longest_row(train_rows, None) == train_rows.lengths.max()
    assert longest_row(train_rows, eval_rows) == eval_rows.lengths.max() > train_rows.lengths.max()


@pytest.mark.parametrize(("num_long", "share"), [(1, None), (2, "10%")])
def test_a_share_of_rows_that_lose_their_end_is_a_warning(num_long, share, load, tokenizer):
    long = row("Spell the word lamp.", 9 * "l-a-m-p")
    lines = [GOOD] * (20 - num_long) + [long] * num_long
    whole = tokenize(json.loads(long), tokenizer)["whole_length"]
    prepare = partial(tokenize, tokenizer=tokenizer, max_length=whole - 1)
    train_rows, _ = load({"train.jsonl": "\n".join(lines)}, prepare=prepare)
    warning = describe_rows(train_rows, None).get("warning")
    if share is None:
        assert warning is None
    else:
        assert warning == (
            f"{share} of the training rows lose their end, from which the model would learn to "
            f"stop: --max_length {whole} fits all of them"
        )
    assert "whole_length" not in train_rows.dataset.column_names


def test_some_prompts_that_are_too_long_are_counted_with_their_fix(problems_of, tokenizer):
    short = partial(tokenize, tokenizer=tokenizer, max_length=30)
    long = row("Spell the word lamp. " * 9, "l-a-m-p")
    for bad, others in (([long], ""), ([long, "{"], "; fix the others")):
        lines = problems_of({"train.jsonl": "\n".join([GOOD, *bad])}, prepare=short)
        (length,) = re.findall(r"(\d+) tokens are prompt", lines[0])
        assert lines[-1].endswith(
            f"{len(bad)} of {len(bad) + 1} lines cannot be used: raise --max_length, the longest "
            f"prompt has {length} tokens{others}, or leave them out with --skip_bad_rows"
        )
