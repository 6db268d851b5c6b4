# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-eval: found by name, near names for a wrong one, and one line for what is missing."""

import json

import pytest

MINE = """
task: my_spelling
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: right
"""
ON_HUB = "task: my_hub\ndataset_path: nobody/nothing\ntest_split: test\ndoc_to_text: q\n"
UNSAFE = "task: my_code\nunsafe_code: true\ndataset_path: nobody/nothing\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with task files, one of which needs no hub."""
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"question": "2 + 2 =", "choices": ["3", "4"], "right": place % 2} for place in range(4)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(MINE.replace("ROWS", str(rows)))
    (tmp_path / "tasks" / "hub.yaml").write_text(ON_HUB)
    (tmp_path / "tasks" / "code.yaml").write_text(UNSAFE)
    return tmp_path / "tasks"


@pytest.fixture
def load(folder, monkeypatch):
    """A function that loads tasks by their names, without lm-eval's own, whose index takes long."""
    from evaluation import tasks

    monkeypatch.setattr(tasks, "needs_index", lambda names: False)

    def load_named(words, may_run_code=False, num_fewshot=None):
        return tasks.load_tasks(words, folder, may_run_code, num_fewshot)

    return load_named


def test_the_number_of_examples_is_set(load):
    (task,) = load("my_spelling", num_fewshot=2).tasks.values()
    assert task.get_config("num_fewshot") == 2


def test_a_task_that_runs_what_the_model_writes_is_refused(load, refused):
    code, line = refused(load, "my_code")
    assert code == 64 and "--confirm_run_unsafe_code" in line
    code, line = refused(load, "my_code", True)
    assert code == 69  # it is loaded, and its data is on the hub


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (None, 64, "no such file"),
        ("task: [", 65, "line 2: not YAML"),
        ("dataset_path: json\n", 65, "neither a task nor a group"),
        (MINE.replace("ROWS", "/none.jsonl"), 65, "cannot be loaded"),
    ],
)
def test_a_bad_file_is_one_line(content, code, says, load, refused, tmp_path):
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_text(content)
    found, line = refused(load, str(path))
    assert found == code and says in line and str(path) in line
