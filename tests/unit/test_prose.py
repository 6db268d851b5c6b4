# SPDX-License-Identifier: Apache-2.0
"""The documents, help texts, docstrings and comments are written in plain, idiomatic English.

tests/prose.py has the words that are not used, and what to write instead.
"""

import json
import re

import pytest

import prose
import prose_files
from launching import REPO

# Sentences that readers of this project had to read twice, shortened to what made them do so
SENTENCES = (
    "For people with a model, rows and some GPUs, and for those who start their own trainer.",
    "The same command goes on from the newest checkpoint that verifies, bit for bit.",
    "A launch command becomes its plan by its first word: peak bytes of a GPU by what holds them.",
    "With next to no compute 0.9 ms a step slower; 1.6 times the tokens a second of Trainer.",
    "To work on, use its environment: `source .venv/bin/activate`.",
    "FSDP2 has no NO_SHARD: its place is `ddp.yaml`.",
    "Counted is an optimizer step at its worst, with rows of `--max_length`.",
    "Measured in fp32, the shapes in bf16.",
    "What is no tensor (CUDA's context, NCCL's buffers) stands in the plan as `constants`.",
    "Data are a hub id, a folder, or .jsonl, .json, .csv, .parquet files.",
    "The output folder has `metrics.jsonl` (one object a logged step).",
    "Fills lines of `--max_length` tokens with whole rows, best fit first.",
    "The loss is computed inside of the output head from the learnt tokens alone.",
    "Models that change their logits after the head are found out and get theirs.",
    "A step that writes no line does not wait for the GPU.",
    "Under DDP gradients lie in the buckets that are reduced, not in copies of them.",
    "The start summary tells what is on; Speed what it brings.",
    "Only what the assistant says is learnt, its end-of-turn token included.",
    "Run the same command again: it goes on from the newest checkpoint.",
    "The same rows a step or a refusal that names the flags to use.",
    "A checkpoint is whole tensors by name and fits all of them.",
    "`none`, to start anew in a folder without checkpoints.",
    "The page has what was tried and what became of it.",
    "Equal bytes: what the fullest rank of those runs really held after a step.",
    "Below 1 means less computed: the recipe makes no logits of prompts, and nor does the loop.",
    "Check `nvidia-smi`, or rehearse.",
    "What two recipes have under one name is the same text, comments included.",
    "The loss is a sum over what is learnt, divided by its number in the whole window.",
    "A bound has its reason beside it and is never loosened to pass.",
    "The same inside of each batch: its rows and its loss stay as they are.",
    "clip the global norm of the gradient; 0: do not",
    "of adapters, dropout and the order of the rows",
    "peak; adapters want about ten times more",
    "at a step whose loss or gradient is not finite; it never changes the weights",
    "arguments that may differ from the checkpoint's although they change the run",
    "gate.weight trains most routers too; nothing behind it: none",
    "the launcher was asked for more than accelerate runs here",
    "a quantized base cannot be trained itself",
    "Stopped by Terminated before the first step: run the same command again",
    "20 of 20 rows cannot be used: mend them, or leave them out",
    "0 lines, tensors unequal",
    "the way to the output head that leads past the model's forward",
    "a flag a character: by place, since the pad token may end turns",
    "evaluate on the blocks with the first so many tokens at most",
    "stopped for want of budget",
    "a setting such as rank, such as that of adapters",
    "packed lines are all of one length",
    "else a second copy of every gradient is kept",
    "tokenised with another template",
    "CPU offload cannot be had without a GPU",
    "Speed at the floor.",
    "Plan a launch on a card of so many bytes.",
    "`make check` tells most of those that you forget.",
    "What cannot be read is told in one line with what helps.",
    "A run that is there would be resumed.",
    "Every broken config is found with its key, its reason and the way out.",
    "The losses are equal, and makes nobody wait.",
    "Not called by hand.",
    "None if it had no time.",
    "A gloo thread lets go of a collective's tensors.",
    "One command copies it into a folder that needs nothing of this repository.",
    "A cell of the benchmark in small: all contestants train alike.",
    "It is no error in other files.",
)
FILES = prose_files.files()


def findings_in(text):
    return prose.findings(prose_files.of_markdown(text), "planted.md")


def notebook(kind, text):
    return json.dumps({"cells": [{"cell_type": kind, "source": text.splitlines(keepends=True)}]})


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_that_had_to_be_read_twice_is_found(sentence):
    assert findings_in(sentence)
    assert prose.findings(prose_files.of_python(f"x = {sentence!r}"), "planted.py")
    assert prose.findings(prose_files.of_python(f"x = 1\n# {sentence}"), "planted.py")


@pytest.mark.parametrize("rule", prose.RULES, ids=lambda rule: rule.instead)
def test_every_rule_finds_one_of_these_sentences(rule):
    assert any(re.search(rule.pattern, text, re.IGNORECASE) for text in (*SENTENCES, "colour"))


def test_a_finding_names_its_line_and_what_to_write_instead():
    found = findings_in("# Title\n\nFine.\n\n- Rows are\n  learnt here.\n")
    assert found == ["planted.md:5: 'learnt': trained on, learned"]
    found = prose.findings(
        prose_files.of_python("x = 1\n\n# The rest is\n# learnt.\n"), "planted.py"
    )
    assert found == ["planted.py:3: 'learnt': trained on, learned"]


@pytest.mark.parametrize("text", ["```bash\nmake anew\n```", "Use `anew`.", "<!-- anew -->"])
def test_code_and_marks_are_not_prose(text):
    assert findings_in(text) == []


# A word that is not used, in each place where prose is read: file, content, line of the finding
PLANTED = {
    "docstring": ("scripts/a.py", 'x = 1\n"""Start anew."""\n', 2),
    "help text": ("scripts/a.py", 'x = 1\nhelp = "start anew"\n', 2),
    "comment of Python": ("tests/a.py", "x = 1\n# Start anew\n", 2),
    "comment beside Python": ("tests/a.py", "x = 1\ny = 2  # start anew\n", 2),
    "docstring of a test": ("tests/a.py", 'def test():\n    """It starts anew."""\n', 2),
    "document": ("CHANGELOG.md", "# Title\n\nStart anew.\n", 3),
    "comment of a YAML": ("accelerate_configs/a.yaml", "# Start\n# anew\na: 1\n", 1),
    "comment beside YAML": ("mkdocs.yml", "a: 1\nb: 2  # start anew\n", 2),
    "text of a form": (".github/ISSUE_TEMPLATE/a.yml", "a:\n  b: >-\n    Start\n    anew\n", 2),
    "abstract": ("CITATION.cff", "title: a\nabstract: Start anew.\n", 2),
    "comment of the Makefile": ("Makefile", "a:\n\t@true\nb:  ## start anew\n", 3),
    "message of the Makefile": ("Makefile", "a:\n\t@printf '\\n== Anew ==\\n'\n", 2),
    "comment of a shell script": (".ci/run", "#!/bin/sh\n# Start anew\n", 1),
    "comment of requirements": ("requirements-dev.txt", "a>=1\nb>=2  # start anew\n", 2),
    "comment of settings": ("pyproject.toml", "[a]\nb = 1  # start anew\n", 2),
    "text of a notebook": ("a.ipynb", notebook("markdown", "# Title\n\nStart anew."), 3),
    "code of a notebook": ("a.ipynb", notebook("code", "!make\n# Start anew"), 2),
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_finding_is_found_in_each_kind_of_file(place):
    name, text, line = PLANTED[place]
    pieces = prose_files.reader_of(REPO / name)(text)
    (found,) = prose.findings(pieces, name)
    assert found.startswith(f"{name}:{line}: '") and "from scratch" in found


NOT_READ = {
    "input of a test": ("tests/a.py", 'x = "start anew"\n'),
    "key of a YAML": ("accelerate_configs/a.yaml", "anew: 1\n"),
    "rule of the Makefile": ("Makefile", "anew:\n\tmake anew\n"),
    "text with a mark inside": ("Makefile", "a:\n\tgrep 'a:.*##anew'\n"),
}


@pytest.mark.parametrize("place", NOT_READ)
def test_code_and_inputs_of_tests_are_not_read(place):
    name, text = NOT_READ[place]
    assert prose.findings(prose_files.reader_of(REPO / name)(text), name) == []


def test_a_comment_beside_code_is_not_joined_with_the_next_one():
    text = "a = 1  # the first\nb = 2  # the second\n# one of\n# two lines\n"
    wanted = [(1, "the first"), (2, "the second"), (3, "one of two lines")]
    for read in (prose_files.of_python, prose_files.of_comments):
        assert [(piece.line, piece.text) for piece in read(text)] == wanted


def test_every_kind_of_file_is_among_the_files():
    names = {str(path.relative_to(REPO)) for path in FILES}
    for name in (
        ".ci/run",
        ".github/workflows/ci.yml",
        "AGENTS.md",
        "CITATION.cff",
        "Makefile",
        "accelerate_configs/ddp.yaml",
        "docs/index.md",
        "examples/quickstart.ipynb",
        "mkdocs.yml",
        "pyproject.toml",
        "recipes/components/run.py",
        "requirements.txt",
        "scripts/planner/zero.py",
        "tests/unit/test_prose.py",
    ):
        assert name in names
    assert "LICENSE" not in names and "results/parity.json" not in names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_the_prose_keeps_to_the_vocabulary(path):
    assert prose.findings(prose_files.read(path), str(path.relative_to(REPO))) == []
