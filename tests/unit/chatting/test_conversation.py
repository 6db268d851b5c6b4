# SPDX-License-Identifier: Apache-2.0
"""What models are asked next, and what a conversation is as a row."""

import json

import pytest

from chatting.conversation import History, Turn
from generation.answering import CUT, STOPPED, Reply
from tasks.illustrated import IMAGE
from vlm import row_to_conversation


@pytest.fixture
def history():
    first = Turn("one?", {0: Reply("first of 0"), 1: Reply("first of 1")})
    return History("Be brief.", [first, Turn("two?", {0: Reply("second of 0")})])


@pytest.mark.parametrize("mark", [STOPPED, CUT])
def test_an_answer_that_is_not_complete_is_not_trained_on(history, mark):
    history.turns.append(Turn("three?", {0: Reply("thi", mark)}))
    conversation = row_to_conversation({"messages": history.messages()})
    assert conversation.is_trained_on == [False, False, True, False, True, False, False]
    assert conversation.messages[-1] == {"role": "assistant", "content": "thi"}


# ---- Saved ----
def conversation(answer):
    return History("Be brief.", [Turn('Größe "東京"?\n\x1b🙂', {0: Reply(answer)})])


@pytest.mark.parametrize("end", ["\n", ""])  # A last line without its end stays a row
def test_rows_are_added_and_none_is_lost(end, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}' + end)
    conversation("one").save(path)
    conversation("two").save(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"prompt": "a", "completion": "b"}
    assert [row["messages"][-1]["content"] for row in rows[1:]] == ["one", "two"]


def test_a_conversation_about_images_is_a_row_with_their_paths(tmp_path):
    said = conversation("A cat.")
    said.turns.append(Turn("<image>?", {0: Reply("", CUT)}, images=["/b.png", "/c.png"]))
    said.turns.append(Turn("What?", {0: Reply("Cats.")}, images=["/a.png"]))
    said.save(tmp_path / "rows.jsonl")
    read = row_to_conversation(json.loads((tmp_path / "rows.jsonl").read_text()))
    assert read.images == ["/b.png", "/c.png", "/a.png"]
    asked = [message["content"] for message in read.messages if message["role"] == "user"]
    assert asked[1:] == [f"{IMAGE}{IMAGE}<image>?", f"{IMAGE}What?"]
    assert read.is_trained_on == [False, False, True, False, False, False, True]
