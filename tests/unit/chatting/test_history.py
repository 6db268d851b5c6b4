# SPDX-License-Identifier: Apache-2.0
"""What models are asked next, and what a conversation is as a row."""

import pytest

from chatting.history import History, Turn
from generation.answering import Ending, Reply
from llama import row_to_conversation


def said(text, ending=Ending.COMPLETE):
    return Reply(text, ending)


@pytest.fixture
def history():
    return History(
        "Be brief.",
        [
            Turn("one?", {0: said("first of 0"), 1: said("first of 1")}),
            Turn("two?", {0: said("second of 0")}),
        ],
    )


def contents(messages):
    return [message["content"] for message in messages]


def test_a_prompt_follows_the_system_prompt_and_the_answers_of_the_chosen_model(history):
    conversation = history.asking("three?")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert contents(conversation.messages)[1:] == [
        "one?",
        "first of 0",
        "two?",
        "second of 0",
        "three?",
    ]
    assert not conversation.tools


def test_another_choice_changes_the_answers_that_it_has_given(history):
    history.chosen = 1
    assert contents(history.messages()) == [
        "Be brief.",
        "one?",
        "first of 1",
        "two?",
        "second of 0",
    ]


def test_undo_takes_the_last_turn_and_nothing_from_an_empty_conversation(history):
    assert history.undo().prompt == "two?"
    assert history.undo().prompt == "one?"
    assert history.undo() is None


@pytest.mark.parametrize("ending", [Ending.STOPPED, Ending.CUT])
def test_an_answer_that_is_not_complete_is_not_trained_on(history, ending):
    history.turns.append(Turn("three?", {0: said("thi", ending)}))
    conversation = row_to_conversation(history.row())
    assert conversation.is_trained_on == [False, False, True, False, True, False, False]
    assert conversation.messages[-1] == {"role": "assistant", "content": "thi"}


def test_an_empty_answer_is_not_trained_on_either(history):
    history.turns.append(Turn("three?", {0: said("")}))
    assert row_to_conversation(history.row()).is_trained_on[-1] is False
