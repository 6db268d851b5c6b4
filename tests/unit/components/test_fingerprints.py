# SPDX-License-Identifier: Apache-2.0
"""The cache of prepared rows knows all that decides about them, and nothing else."""

import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from components.fingerprints import identify_tokenizer, prepared_fingerprint

# A project whose recipe reaches a component through another one
RECIPE = '''
"""A recipe."""
import sys
from dataclasses import dataclass
from functools import partial
from parts.words import split_words, unused
from stars import *
from sizes import LIMITS

@dataclass
class Arguments:
    dataset_name: list[str]
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    eval_dataset_name: str | None = None
    eval_split: float = 0
    skip_bad_rows: bool = False
    dataset_num_proc: int | None = None
    seed: int = 0
    dataset_weights: tuple = ()

def prepare(row):
    """Return the words of a row."""
    return {"words": split_words(row["text"])[: LIMITS["words"]]}

def prepare_with_star(row):
    return {"words": star(row["text"])}

def prepare_lazily(row):
    from parts import letters
    return {"words": letters.change(row["text"])}

def train():
    return 1

if __name__ == "__main__":
    from components.mixture import read_splits

    rows, _ = read_splits(Arguments([sys.argv[1]]), prepare, evaluate=False)
    print([words.tolist() for words in rows.dataset["words"][:]])
'''
WORDS = '''
"""Words."""
import re
from . import letters
PATTERN = re.compile(" ")

def split_words(text):
    return [letters.change(word) for word in PATTERN.split(text)]

def unused(text):
    return 1
'''
LETTERS = '''
"""Letters."""
try:
    from string import capwords as change_case
except ImportError:
    change_case = None

def change(word):
    return change_case(word)
'''
STARS = '''
"""Stars."""
def star(text):
    return text
'''
SIZES = '''
"""Sizes."""
LIMITS = {"words": 2}
OTHERS = {"words": 3}
'''


@dataclass(frozen=True)
class Project:
    """A folder with a recipe and what it imports."""

    folder: Path

    def edit(self, file, old, new):
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "__init__.py").touch()
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "parts" / "words.py").write_text(WORDS)
    (folder / "parts" / "letters.py").write_text(LETTERS)
    (folder / "sizes.py").write_text(SIZES)
    (folder / "stars.py").write_text(STARS)
    return Project(folder)


@pytest.fixture
def recipe(project, monkeypatch):
    """The project's recipe, imported."""
    monkeypatch.syspath_prepend(project.folder)
    names = ["recipe", "sizes", "stars", "parts", "parts.words", "parts.letters"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("recipe")
    for name in names:
        sys.modules.pop(name, None)


REACHED = {
    "the function": ("recipe.py", 'row["text"])[', 'row["words"])['),
    "a component": ("parts/words.py", "for word in", "for word in 2 *"),
    "a value that it uses": ("parts/words.py", '" "', '"b"'),
    "a component of a component": ("parts/letters.py", "return change_case(", "return str("),
    "what is imported": ("parts/letters.py", "import capwords as", "import digits as"),
    "a constant": ("sizes.py", '{"words": 2}', '{"words": 1}'),
    "a constant that is changed later": ("sizes.py", "OTHERS", "LIMITS |= {}\nOTHERS"),
}


@pytest.mark.parametrize("name", REACHED)
def test_an_edit_of_what_prepares_the_rows_is_seen(name, project, recipe):
    before = prepared_fingerprint("rows", recipe.prepare)
    project.edit(*REACHED[name])
    assert prepared_fingerprint("rows", recipe.prepare) != before


def test_what_is_not_imported_does_not_matter(project, recipe):
    before = prepared_fingerprint("rows", recipe.prepare)
    (project.folder / "another.py").write_text("import this")
    assert prepared_fingerprint("rows", recipe.prepare) == before


def test_a_module_of_a_package_that_is_not_imported_yet_does(project, recipe):
    before = prepared_fingerprint("rows", recipe.prepare)
    (project.folder / "parts" / "later.py").write_text("import this")
    assert prepared_fingerprint("rows", recipe.prepare) != before


# ---- Tokenizers ----
@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def test_a_tokenizer_is_known_by_its_content_not_by_its_place(tokenizer, tiny, tmp_path):
    known = identify_tokenizer(tokenizer)
    copied = shutil.copytree(tiny / "model", tmp_path / "copied")
    assert identify_tokenizer(AutoTokenizer.from_pretrained(copied)) == known
    tokenizer.save_pretrained(tmp_path / "saved")
    assert identify_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "saved")) == known


def change_template(tokenizer):
    tokenizer.chat_template += " "


def add_token(tokenizer):
    tokenizer.add_tokens([AddedToken("<new>")])


def change_end(tokenizer):
    tokenizer.eos_token = "<|end_of_turn|>"


def change_side(tokenizer):
    tokenizer.truncation_side = "left"


@pytest.mark.parametrize("change", [change_template, add_token, change_end, change_side])
def test_another_content_is_another_tokenizer(change, tokenizer):
    known = identify_tokenizer(tokenizer)
    change(tokenizer)
    assert identify_tokenizer(tokenizer) != known
