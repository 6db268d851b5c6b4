# SPDX-License-Identifier: Apache-2.0
"""An edit changes one key of a YAML and leaves everything else as it is."""

import pytest
import yaml

from components.config_findings import delete, move, rename, set_value
from configs.comments import comments
from configs.edits import CannotEditError, edit_content, edit_text

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


COMMENTED = """\
# the file

a: 1  # behind a

# apart

# above b
# and again
b:  # behind b
  # above c
  c: 2  # behind c
  # below c
# section_off: 1
d: 3  # behind d
    # deeper
# above e
e: 4
# at the end
"""


@pytest.mark.parametrize(
    ("path", "gone"),
    [
        ("a", ["a: 1  # behind a"]),
        ("b", COMMENTED.splitlines()[6:12]),
        ("b.c", COMMENTED.splitlines()[6:12]),
        ("d", ["d: 3  # behind d", "    # deeper"]),
        ("e", ["# above e", "e: 4"]),
    ],
)
def test_a_key_takes_its_own_comments_along_and_no_other(path, gone):
    kept = [line for line in COMMENTED.splitlines() if line not in gone]
    assert edit_text(COMMENTED, delete(path)).splitlines() == kept


def test_the_comments_at_the_top_are_about_the_file_and_stay():
    for top in ("# one\n# two\n", "---\n# one\n", "\n# one\n"):
        assert edit_text(f"{top}a: 1\nb: 2\n", delete("a")) == f"{top}b: 2\n"


def test_a_key_that_moves_takes_its_comments_to_its_new_place():
    text = "# top\na: 1\n# why\n# so\nb: 2  # two\nc:\n  d: 3\n"
    moved = "# top\na: 1\nc:\n  d: 3\n  # why\n  # so\n  e: 2  # two\n"
    assert edit_text(text, move("b", "c.e", 2)) == moved
    back = "# top\na: 1\nc:\n  d: 3\n# why\n# so\nb: 2  # two\n"
    assert edit_text(moved, move("c.e", "b", 2)) == back


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


# ---- Flow style ----
ONE_LINE = "{a: 1, b: {c: 2, d: [x, y]}, e: {}}\n"
MANY_LINES = """\
{
  # about a
  a: 1,  # one
  "b": {"c": 2, "d": 3},
  # about e
  e: 4  # last
}
"""


@pytest.mark.parametrize(
    ("text", "edit", "edited"),
    [
        (ONE_LINE, set_value("a", "x, y"), '{a: "x, y", b: {c: 2, d: [x, y]}, e: {}}\n'),
        (ONE_LINE, set_value("b.z", True), "{a: 1, b: {c: 2, d: [x, y], z: true}, e: {}}\n"),
        (ONE_LINE, set_value("e.z", 3), "{a: 1, b: {c: 2, d: [x, y]}, e: {z: 3}}\n"),
        (ONE_LINE, set_value("n.z", 3), "{a: 1, b: {c: 2, d: [x, y]}, e: {}, n: {z: 3}}\n"),
        (ONE_LINE, rename("b.c", "f"), "{a: 1, b: {f: 2, d: [x, y]}, e: {}}\n"),
        (ONE_LINE, delete("a"), "{b: {c: 2, d: [x, y]}, e: {}}\n"),
        (ONE_LINE, delete("b.d"), "{a: 1, b: {c: 2}, e: {}}\n"),
        (ONE_LINE, delete("e"), "{a: 1, b: {c: 2, d: [x, y]}}\n"),
        (ONE_LINE, move("a", "b.z", 1), "{b: {c: 2, d: [x, y], z: 1}, e: {}}\n"),
        ('{"a":1,"b":2}', rename("a", "c"), '{"c":1,"b":2}\n'),
        ("{a: {b: 1}, c: 2}", delete("a.b"), "{c: 2}\n"),
    ],
    ids=str,
)
def test_flow_style_is_edited_in_place(text, edit, edited):
    assert edit_text(text, edit) == edited
    assert yaml.safe_load(edited) == edit_content(yaml.safe_load(text), edit)


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (delete("a"), "  # about a\n  a: 1,  # one\n", ""),
        (delete("b.d"), ', "d": 3', ""),
        (rename("b", "f"), '"b": {', '"f": {'),
        (set_value("a", 7), "a: 1,  # one", "a: 7,  # one"),
        (set_value("z", 5), "e: 4  # last\n", "e: 4,  # last\n  z: 5\n"),
        (set_value("z.y", 5), "e: 4  # last\n", "e: 4,  # last\n  z: {y: 5}\n"),
    ],
    ids=str,
)
def test_flow_style_over_lines_keeps_its_lines_and_comments(edit, before, after):
    assert edit_text(MANY_LINES, edit) == MANY_LINES.replace(before, after)


def test_the_last_item_of_lines_leaves_a_mapping_that_can_be_read():
    edited = edit_text(MANY_LINES, delete("e"))
    assert yaml.safe_load(edited) == {"a": 1, "b": {"c": 2, "d": 3}}
    assert comments(edited)[:2] == ["# about a", "# one"]


# ---- What cannot be edited ----
@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("a: &x {b: 1}\nc: *x\n", delete("a")),  # the alias would stand for nothing
        ("a: &x {b: 1}\nc: *x\n", set_value("c.d", 2)),  # a would change too
        ("a: 1\nb: 2\na: 3\n", delete("a")),  # the first one would count
    ],
    ids=str,
)
def test_an_edit_that_would_change_something_else_is_refused(text, edit):
    with pytest.raises(CannotEditError):
        edit_text(text, edit)


def test_text_of_several_lines_ends_where_it_ends():
    text = "a: |\n  x\n  y\nb: 2\n"
    assert edit_text(text, delete("a")) == "b: 2\n"
    assert edit_text("--- \na: 1\nb:\n  c: 2\n...\n", set_value("n.d", 3)) == (
        "--- \na: 1\nb:\n  c: 2\nn:\n  d: 3\n...\n"
    )
