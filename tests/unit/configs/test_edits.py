# SPDX-License-Identifier: Apache-2.0
"""An edit changes one key of a YAML and leaves everything else as it is."""

import pytest
import yaml

from components.config_findings import delete, rename, set_value
from configs.edits import comments, edit_content, edit_text

TEXT = "# a\none: 1  # b\n\nsection:\n  # c\n  two: 2  # d\n  three: x\nlast: '#'\n"


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (set_value("one", 5), "one: 1", "one: 5"),
        (set_value("section.three", "no"), "three: x", 'three: "no"'),
        (set_value("section.four", True), "three: x\n", "three: x\n  four: true\n"),
        (set_value("new.key", 1), "last: '#'\n", "last: '#'\nnew:\n  key: 1\n"),
        (rename("section.two", "second"), "  two: 2", "  second: 2"),
        (delete("section.three"), "  three: x\n", ""),
        (delete("last"), "last: '#'\n", ""),
    ],
    ids=str,
)
def test_only_the_lines_of_the_key_change(edit, before, after):
    edited = edit_text(TEXT, edit)
    assert edited == TEXT.replace(before, after)
    assert yaml.safe_load(edited) == edit_content(yaml.safe_load(TEXT), edit)


def test_the_last_key_of_a_section_takes_the_section_along():
    assert edit_text("a: 1\nb:\n  c:\n    d: 2\n", delete("b.c.d")) == "a: 1\n"


@pytest.mark.parametrize("empty", ["b: {}", "b:", "b: null"])
def test_a_key_goes_into_an_empty_section_whose_comment_stays(empty):
    edited = edit_text(f"a: 1\n{empty}  # mine\nc: 2\n", set_value("b.d", 3))
    assert edited == "a: 1\nb:  # mine\n  d: 3\nc: 2\n"


def test_the_comment_of_a_deleted_line_stays_as_a_line():
    assert edit_text("a: 1\nb: 2  # why\n", delete("b")) == "a: 1\n# why\n"


def test_a_list_that_becomes_text_keeps_the_comments_of_its_lines():
    edited = edit_text("a:\n  - x  # one\n  - y\nb: 2  # two\n", set_value("a", "x,y"))
    assert edited == "# one\na: x,y\nb: 2  # two\n"


def test_a_key_without_a_value_gets_one():
    assert edit_text("a:\nb: 1\n", set_value("a", 2)) == "a: 2\nb: 1\n"


def test_comments_are_what_is_between_tokens():
    assert comments(TEXT) == ["# a", "# b", "# c", "# d"]


def test_the_content_that_is_edited_stays_as_it_is():
    content = {"a": {"b": 1}}
    assert edit_content(content, delete("a.b")) == {}
    assert content == {"a": {"b": 1}}
