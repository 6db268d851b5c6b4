"""Every bad file ends with 65, its name, the line or row, what is wrong and what to do, before a model loads;
--skip_bad_rows leaves the bad rows out and counts them; and what only looks odd is read as it is meant.
"""

import ast
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

import bert
import llama
import llama_dpo
import vit
from components import columns, conversations, fingerprints, rows
from components.chat import DEFAULT_CHAT_TEMPLATE
from components.cli import parse_arguments
from components.packing import TokenCollator
from components.rows import describe_rows
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


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer):
    """A function that writes files and loads them as the recipe would with the given flags."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()

    def load_files(files, *flags, tokenizer=tokenizer):
        for name, content in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        alone = [name.split("/")[0] for name in files if name.startswith("rows")]
        source = tmp_path / "data" / "".join(alone)  # the folder, if there is no such file
        words = ["--dataset_name", source, "--max_length", 200, "--eval_strategy", "no", *flags]
        args = parse_arguments(llama.Arguments, words=[str(word) for word in words])
        rows, eval_rows = llama.load_data(args, tokenizer)
        notes = describe_rows(rows, eval_rows)
        eval_table = eval_rows and eval_rows.dataset.with_format(None)
        return rows.dataset.with_format(None), eval_table, notes

    return load_files


@pytest.fixture
def problems_of(load, capsys):
    """A function that does the same, expects 65 and returns the lines of the message."""

    def stops(*arguments, **options):
        with pytest.raises(SystemExit) as stopped:
            load(*arguments, **options)
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert (
            stopped.value.code == 65
            and 1 <= len(lines) <= 6
            and all(len(line) < 600 for line in lines)
        )
        return lines

    return stops


def in_line_2(line):
    line = line if isinstance(line, bytes) else line.encode()
    return {"rows.jsonl": b"\n".join([GOOD.encode(), line, b"", GOOD.encode()])}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_left_out(name, load, problems_of):
    line, words = BAD_LINES[name].content, BAD_LINES[name].says
    first, last = problems_of(in_line_2(line))
    assert "rows.jsonl, line 2: " in first and all(word in first for word in words), first
    assert (
        "1 of 4 lines cannot be used" in last and "fix them" in last and "--skip_bad_rows" in last
    )
    rows, _, counts = load(in_line_2(line), "--skip_bad_rows")
    assert (
        list(rows["row"]) == [1, 4]
        and counts["train rows"] == "2, 0 truncated to --max_length, 1 left out"
    )


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name, load, problems_of):
    bad = BAD_FILES[name]
    files, words, kept = bad.files, bad.says, bad.kept
    message = "\n".join(problems_of(files))
    assert all(word in message for word in words), message
    if kept is None:
        assert problems_of(files, "--skip_bad_rows") == message.splitlines()
    else:
        rows, _, counts = load(files, "--skip_bad_rows")
        assert list(rows["row"]) == kept and counts["train rows"].startswith(f"{len(kept)}, ")


@pytest.mark.parametrize("name", GOOD_FILES)
def test_what_looks_odd_is_read_as_it_is_meant(name, load, tokenizer):
    files, expected = GOOD_FILES[name].files, GOOD_FILES[name].rows
    rows, _, counts = load(files)
    assert (
        list(rows["row"]) == [number for number, _, _ in expected]
        and " 0 left out" in counts["train rows"]
    )
    for found, (_, prompt, completion) in zip(rows, expected, strict=True):
        wanted = llama.tokenize_row({"prompt": prompt, "completion": completion}, tokenizer, 200)
        assert found["input_ids"] == wanted["input_ids"] and found["labels"] == wanted["labels"]


def test_two_processes_find_the_same_rows(load, problems_of):
    lines = [GOOD, "{", "", GOOD, GOOD, row("a", 5), GOOD, "[]", GOOD]
    files = {"rows.jsonl": "\r\n".join(lines)}
    alone = problems_of(files)
    assert problems_of(files, "--dataset_num_proc", 2) == alone and "line 8: " in alone[2]
    rows, _, counts = load(files, "--dataset_num_proc", 2, "--skip_bad_rows")
    assert list(rows["row"]) == [1, 4, 5, 7, 9] and counts["train rows"].endswith(" 3 left out")


def test_evaluation_rows_are_read_with_the_same_care(load, problems_of, tmp_path):
    files = {"train.jsonl": f'{GOOD}\n{{"question": "a"', "test.jsonl": f"{GOOD}\n{{\n"}
    flags = ["--eval_strategy", "epoch"]
    rows, eval_rows, counts = load(files, *flags, "--skip_bad_rows")
    assert list(rows["row"]) == list(eval_rows["row"]) == [1] and counts["eval rows"].endswith(
        " 1 left out"
    )
    assert "test.jsonl, line 2: " in problems_of({"train.jsonl": GOOD}, *flags)[0]
    missing = tmp_path / "held_out.jsonl"
    assert (
        "held_out.jsonl: [Errno 2] No such file"
        in problems_of({}, *flags, "--eval_dataset_name", missing)[0]
    )


def test_without_evaluation_rows_the_training_rows_are_not_read_anew_for_them(load, tmp_path):
    flags = ["--eval_strategy", "epoch", "--skip_bad_rows"]
    for source in ("", "train.jsonl"):  # a folder, a file
        flags += ["--dataset_name", tmp_path / "data" / source]
        rows, eval_rows, counts = load({"train.jsonl": f"{GOOD}\n{{\n"}, *flags)
        assert list(rows["row"]) == [1] and eval_rows is None and counts["eval rows"] == "none"


def test_an_unreadable_file_is_named(problems_of, monkeypatch):
    def refuse(*arguments, **options):  # root may read all files
        raise PermissionError(13, "Permission denied", "rows.jsonl")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert "rows.jsonl: [Errno 13] Permission denied" in problems_of({"rows.jsonl": GOOD})[0]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "TemplateError: Roles must alternate"),
        ("{{ messages[0].name.first }}", "UndefinedError"),
        ("{% for message in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'] }}", "no answer in the text that the chat template makes"),
        ("", ""),
    ],
    ids=["role order", "unknown name", "no template", "arithmetic", "no answers", "nothing"],
)
def test_what_the_template_raises_is_a_problem_of_the_row(template, says, problems_of, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = template
    (problem,) = problems_of({"rows.jsonl": GOOD}, tokenizer=tokenizer)
    assert "rows.jsonl, line 1, the only one: " in problem and says in problem, problem


def test_a_tokenizer_without_places_is_a_problem(problems_of):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    (problem,) = problems_of({"rows.jsonl": GOOD}, tokenizer=tokenizer)
    assert "line 1, the only one: cannot be used: KeyError: 'offset" in problem


def test_an_answer_cut_to_nothing_is_a_problem_and_one_cut_short_is_not(
    load, problems_of, tokenizer
):
    row = llama.tokenize_row(json.loads(GOOD), tokenizer, 1024)
    prompt = row["labels"].count(-100)
    (problem,) = problems_of({"rows.jsonl": GOOD}, "--max_length", prompt)
    assert (
        f"within --max_length {prompt}: raise --max_length, the longest prompt has {prompt} tokens"
        in problem
    )
    assert load({"rows.jsonl": GOOD}, "--max_length", prompt + 1)[2]["train rows"] == (
        "1, 1 truncated to --max_length, 0 left out"
    )


# ---- Where no row can be used: {name: content}, flags, the one line ----
ALL_ALIKE = {
    "columns": (
        {"rows.csv": "frage,antwort\na,b\nc,d\n"},
        [],
        "rows.csv: none of the 2 rows can be used, all for the same reason: {file}, row 1: has the columns "
        "frage, antwort; needs messages | prompt, completion | instruction, output | question, answer; "
        "messages is a list: rename your columns, or edit PROMPT_AND_ANSWER in llama.py",
    ),
    "too long": (
        {"rows.jsonl": f"{row('a' * 500)}\n\n{row('a' * 600)}\n"},
        [],
        "rows.jsonl: none of the 2 lines can be used, all for the same reason: {file}, line 1: has no answer "
        "within --max_length 200: raise --max_length, the longest prompt has {longest} tokens",
    ),
    "tools": (
        {"rows.jsonl": f"{row(tools=['a'])}\n" * 3},
        ["--skip_bad_rows"],
        "rows.jsonl: none of the 3 lines can be used, all for the same reason: {file}, line 1: has tools, which "
        "this recipe does not pass to the chat template yet: remove the column if the answers do not need it, "
        "else leave out the row",
    ),
}


@pytest.mark.parametrize("name", ALL_ALIKE)
def test_where_all_rows_fail_alike_one_line_has_the_cure(
    name, problems_of, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.chdir(Path(llama.__file__).parent)  # the file is named as it is seen from there
    files, flags, says = ALL_ALIKE[name]
    longest = llama.tokenize_row({"prompt": "a" * 600, "completion": "b"}, tokenizer, 2000)[
        "labels"
    ].count(-100)
    folder = tmp_path / "data"
    says = says.format(file=folder / next(iter(files)), longest=longest)
    assert problems_of(files, *flags) == [f"error: {folder}/{says}"]


def test_where_all_rows_fail_and_not_alike_nobody_is_advised_to_leave_them_out(problems_of):
    lines = problems_of({"rows.jsonl": f"{{\n{row('a', 5)}\n"})
    assert len(lines) == 3 and lines[-1].endswith(
        "rows.jsonl: none of the 2 lines can be used: fix them"
    )


def test_columns_and_keys_that_nothing_reads_are_named(load):
    answer = ASSISTANT | {"id": "x7"}
    lines = [row(source="web", score=1), row(source="web"), conversation(USER, answer)]
    files = {"rows.jsonl": "\n".join(lines)}
    told = load(files)[2]["train rows"]
    assert told.endswith(
        "; not read: source in 2 rows, score in 1 rows, id (of messages) in 1 rows"
    )
    columns = load({"rows.csv": "prompt,completion,source\na,b,web\nc,d,web\n"})[2]["train rows"]
    assert columns == "2, 0 truncated to --max_length, 0 left out; not read: source"
    table = {
        "rows.parquet": parquet_of(
            prompt=["a"], completion=["b"], tools=pa.nulls(1), messages=pa.nulls(1)
        )
    }
    assert "not read" not in load(table)[2]["train rows"]  # null is as if absent


def test_the_cache_knows_the_rules_of_a_row(load, monkeypatch):
    """A row that was tokenized before a rule was made is read again."""
    file = {"rows.jsonl": row(tools=["a"])}
    read = fingerprints.read_definitions

    def read_without_the_rule(path):
        found = read(path)
        if path.name == "conversations.py":
            found["TOOL_COLUMNS"] = ast.parse("TOOL_COLUMNS = ()").body
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "read_definitions", read_without_the_rule)
        patch.setattr(conversations, "TOOL_COLUMNS", ())
        assert "1, 0 truncated" in load(file)[2]["train rows"]
    with pytest.raises(SystemExit):
        load(file)


def rules_in(module):
    """The names of a module's rules of a row, and of what they go by."""
    kinds = ("validate", "refuse", "check", "find", "is_empty", "shorten", "list_columns")
    kinds += ("parse_line", "explain", "TOOL", "TRAINED", "SAID")
    definitions = fingerprints.read_definitions(Path(module.__file__).resolve())
    return {name for name in definitions if name.startswith(kinds)}


def test_all_rules_are_known_to_the_cache():
    """What is kept in the cache follows from functions that a recipe calls for a row."""
    reached = fingerprints.ReachedCode()
    for function in (
        llama.tokenize_row,
        llama_dpo.tokenize_answers,
        bert.tokenize_text,
        vit.label_image,
        rows.attempt,
    ):
        reached.add(Path(function.__code__.co_filename).resolve(), function.__name__)
    known = {code.partition(":")[0] for code in reached.code}
    rules = rules_in(conversations) | rules_in(columns) | {"check_image", "parse_line", "explain"}
    assert {"refuse_tools", "is_empty", "TOOL_COLUMNS", "SAID_KEYS"} < rules
    assert rules <= known


def test_the_number_of_a_row_reaches_the_batch(load, tokenizer):
    rows = load(in_line_2("{"), "--skip_bad_rows")[0]
    collate = TokenCollator(pad_token_id=tokenizer.pad_token_id)
    assert collate(rows.with_format("numpy"), [[0], [1]])["row"] == [1, 4]


def test_rows_are_tokenised_once(load, tmp_path):
    files = {"train.jsonl": f"{GOOD}\n{{\n", "test.jsonl": GOOD}
    flags = ["--eval_strategy", "epoch", "--skip_bad_rows"]
    load(files, *flags)
    cached = sorted((tmp_path / "cache").rglob("*.arrow"))
    load(
        {},
        "--dataset_name",
        tmp_path / "data",
        *flags,
        "--seed",
        1,
        "--output_dir",
        tmp_path / "other",
    )
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == cached
    load({}, "--dataset_name", tmp_path / "data", *flags, "--max_length", 100)
    assert len(sorted((tmp_path / "cache").rglob("*.arrow"))) == len(cached) + 2
