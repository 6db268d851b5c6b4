# SPDX-License-Identifier: Apache-2.0
"""The terminal: what is read, shown, kept and refused, with models that say what they are told."""

import json
from pathlib import Path

import pytest

from chatting.history import History
from chatting.speakers import Decoding
from chatting.terminal import Terminal
from generation.streaming import Ending, Reply


class FakeAnswer:
    """An answer in parts; a part that is an exception is raised instead."""

    def __init__(self, parts):
        self.parts = iter(parts)
        self.said = []
        self.ending = Ending.COMPLETE

    def __iter__(self):
        return self

    def __next__(self):
        part = next(self.parts)
        if not isinstance(part, str):
            raise part
        self.said.append(part)
        return part

    def stop(self):
        self.ending = Ending.STOPPED
        self.parts = iter([next(self.parts)])  # the part that was being generated

    def result(self):
        if self.said == ["refused"]:
            raise ValueError("the prompt has 900 tokens; the model is limited to 512\nmore")
        return Reply("".join(self.said), self.ending)


class FakeSpeaker:
    """A model with answers to give; `asked` has the messages that it saw."""

    def __init__(self, name, *answers):
        self.name = name
        self.answers = list(answers)
        self.asked = []
        self.temperatures = []

    def answer(self, history, prompt, decoding, stopping):
        self.asked.append(history.asking(prompt).messages)
        self.temperatures.append(decoding.temperature)
        return FakeAnswer(self.answers.pop(0))


@pytest.fixture
def converse(monkeypatch, tmp_path, capsys):
    """A function from models and lines of input to the history, and what was printed."""

    def run(speakers, *lines, is_interactive=False):
        typed = iter(lines)
        prompts = []

        def read(prompt=""):
            prompts.append(prompt)
            try:
                line = next(typed)
            except StopIteration:
                raise EOFError from None
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        rows = tmp_path / "rows.jsonl"
        terminal = Terminal(speakers, History(), Decoding(0.0, 9), rows, is_interactive)
        terminal.run()
        return terminal, capsys.readouterr(), prompts

    return run


def texts(history):
    return [message["content"] for message in history.messages()]


def test_a_conversation_is_answered_turn_by_turn(converse):
    model = FakeSpeaker("a", ["Hel", "lo."], ["Bye."])
    terminal, printed, prompts = converse([model], "Hi", "", "  ", "Go")
    assert texts(terminal.history) == ["Hi", "Hello.", "Go", "Bye."]
    assert [message["content"] for message in model.asked[1]] == ["Hi", "Hello.", "Go"]
    assert printed.out == "Hello.\nBye.\n\n" and printed.err == ""
    assert set(prompts) == {""}  # no prompt for a pipe


def test_a_person_sees_a_prompt_and_how_to_get_help(converse):
    _, printed, prompts = converse([FakeSpeaker("runs/a")], is_interactive=True)
    assert prompts == ["> "] and "1 runs/a\n/help lists the commands" in printed.out


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "", " two", 'three"""'], "one\n\n two\nthree"),
        (['"""', "one", "/help", '"""'], "one\n/help"),
        (['"""one"""'], "one"),
        (["one\\"], "one"),  # the input ends
        (['"""one', "two"], "one\ntwo"),
        ([" /etc"], "/etc"),
    ],
)
def test_several_lines_are_one_text(lines, text, converse):
    model = FakeSpeaker("a", ["yes"])
    terminal, _, _ = converse([model], *lines)
    assert texts(terminal.history) == [text, "yes"]


def test_ctrl_c_stops_an_answer_and_keeps_its_part(converse):
    model = FakeSpeaker("a", ["Once ", KeyboardInterrupt(), "upon ", "a time"], ["ok"])
    terminal, printed, _ = converse([model], "Tell", "Now")
    assert texts(terminal.history) == ["Tell", "Once upon ", "Now", "ok"]
    assert terminal.history.turns[0].replies[0].ending is Ending.STOPPED
    assert "Once upon  [stopped]\nok" in printed.out


def test_ctrl_c_stops_the_models_that_have_not_answered_yet_too(converse):
    models = [
        FakeSpeaker("a", ["one ", KeyboardInterrupt(), "two"]),
        FakeSpeaker("b", ["never"]),
    ]
    terminal, printed, _ = converse(models, "Tell")
    assert list(terminal.history.turns[0].replies) == [0] and "never" not in printed.out


def test_a_second_ctrl_c_leaves(converse):
    model = FakeSpeaker("a", ["Once ", KeyboardInterrupt(), KeyboardInterrupt(), "more"])
    _, printed, prompts = converse([model], "Tell", "Next")
    assert len(prompts) == 1 and printed.out == "Once \n"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), "/exit"])
def test_the_prompt_is_left_without_a_traceback(end, converse):
    model = FakeSpeaker("a")
    converse([model], end, "Next")
    assert model.asked == []


def test_a_prompt_that_cannot_be_answered_is_one_line_and_the_conversation_remains(converse):
    model = FakeSpeaker("a", ["yes"], ["refused"], ["again"])
    terminal, printed, _ = converse([model], "one", "long", "two")
    assert texts(terminal.history) == ["one", "yes", "two", "again"]
    assert printed.err == "error: the prompt has 900 tokens; the model is limited to 512\n"


def test_what_a_model_or_a_prompt_says_cannot_drive_the_terminal(converse):
    model = FakeSpeaker("a", ["\x1b[2J", "\x07"])
    _, printed, _ = converse([model], "\x1b]0;title\x07", "/undo")
    assert printed.out == "\\x1b[2J\\x07\nTaken back: \\x1b]0;title\\x07\n\n"


def test_all_models_are_asked_and_the_chosen_ones_answers_continue(converse):
    models = [FakeSpeaker("a", ["a1"], ["a2"], ["a3"]), FakeSpeaker("b", ["b1"], ["b2"], ["b3"])]
    terminal, printed, _ = converse(models, "one", "two", "/model 2", "three")
    for model in models:
        seen = [[message["content"] for message in messages] for messages in model.asked]
        assert seen[1] == ["one", "a1", "two"]
        assert seen[2] == ["one", "b1", "two", "b2", "three"]
    assert "1 a:\na1\n2 b:\nb1\n" in printed.out
    assert "1 a\n2 b\nThe conversation continues with the answers of 2" in printed.out


def test_undo_and_retry_change_the_last_turn(converse):
    model = FakeSpeaker("a", ["first"], ["second"], ["third"])
    terminal, printed, _ = converse([model], "one", "/retry", "two", "/undo")
    assert texts(terminal.history) == ["one", "second"]
    assert [message["content"] for message in model.asked[1]] == ["one"]
    assert "Taken back: two" in printed.out


def test_a_retry_that_fails_keeps_the_old_answer(converse):
    model = FakeSpeaker("a", ["first"], ["refused"])
    terminal, printed, _ = converse([model], "one", "/retry")
    assert texts(terminal.history) == ["one", "first"] and "900 tokens" in printed.err


def test_a_retry_that_one_of_two_models_fails_leaves_the_conversation_as_it_was(converse):
    models = [FakeSpeaker("a", ["first"], ["second"]), FakeSpeaker("b", ["other"], ["refused"])]
    terminal, _, _ = converse(models, "one", "/retry")
    (turn,) = terminal.history.turns
    assert [turn.replies[model].text for model in (0, 1)] == ["first", "other"]


@pytest.mark.parametrize("command", ["/undo", "/retry", "/save"])
def test_without_a_turn_there_is_nothing_to_change_or_save(command, converse):
    _, printed, _ = converse([FakeSpeaker("a")], command)
    assert printed.err == "error: nothing was said yet\n"


def test_settings_apply_from_the_next_prompt_on(converse):
    model = FakeSpeaker("a", ["x"], ["y"])
    terminal, printed, _ = converse(
        [model], "one", "/system Be brief.", "/temperature 0.7", "/temperature hot", "two"
    )
    assert model.temperatures == [0.0, 0.7]
    assert model.asked[1][0] == {"role": "system", "content": "Be brief."}
    assert "/temperature needs a number" in printed.err


def test_reset_starts_over_and_unknown_commands_are_one_line(converse):
    model = FakeSpeaker("a", ["x"])
    terminal, printed, _ = converse([model], "one", "/reset", "/nothing", "/help")
    assert texts(terminal.history) == []
    assert printed.err == "error: /nothing: no such command; /help lists them\n"
    assert "/temperature X" in printed.out


def test_save_appends_the_conversation_of_the_chosen_model(converse, tmp_path):
    models = [FakeSpeaker("a", ["a1"]), FakeSpeaker("b", ["b1"])]
    other = tmp_path / "other.jsonl"
    _, printed, _ = converse(models, "one", "/save", "/model 2", f"/save {other}", "/save")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["content"] for row in rows] == ["a1", "b1"]
    assert json.loads(other.read_text())["messages"][1]["content"] == "b1"
    assert "rows.jsonl has 2 rows." in printed.out and "the answers of b: " in printed.out


def test_a_row_that_cannot_be_written_is_one_line_and_the_conversation_is_kept(converse, tmp_path):
    model = FakeSpeaker("a", ["x"], ["y"])
    path = tmp_path / "none" / "rows.jsonl"
    terminal, printed, _ = converse([model], "one", f"/save {path}", "two")
    assert printed.err == f"error: cannot write {path}: No such file or directory\n"
    assert texts(terminal.history) == ["one", "x", "two", "y"]
    assert not Path(path).exists()
