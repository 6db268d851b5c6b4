# SPDX-License-Identifier: Apache-2.0
"""The list of workarounds, and what their tests say of each."""

import json
import sys

import pytest

import workarounds
from components import upstream
from proof.workarounds import Outcomes, first_sentence, verdict_of


def test_a_workaround_of_which_one_harm_is_gone_is_partly_fixed():
    still_there = Outcomes(without=[True], with_it=[True])
    gone = Outcomes(without=[False], with_it=[True])
    assert verdict_of([still_there, gone]) == "partly fixed"


def test_the_purpose_is_one_sentence():
    assert (
        first_sentence("Keep it,\nsince 0.4 % is lost. And more.")
        == "Keep it, since 0.4 % is lost."
    )
    assert first_sentence("Keep it.") == "Keep it."


def test_the_command_lists_every_workaround_with_its_test(monkeypatch, capsys, tmp_path):
    path = tmp_path / "new" / "list.json"
    monkeypatch.setattr(sys, "argv", ["workarounds.py", "--json", str(path)])
    workarounds.main()
    table = capsys.readouterr().out
    listed = json.loads(path.read_text())
    assert [each["name"] for each in listed] == list(upstream.workarounds())
    for each in listed:
        assert each["tests"] and each["verdict"] is None
        assert all(text in table for text in (each["name"], each["purpose"], each["installed"]))


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("needed", 0), ("not tested", 0), ("fixed", 1), ("partly fixed", 1), ("not cured", 1)],
)
def test_the_exit_code_of_the_check_says_whether_all_are_needed(verdict, code, monkeypatch, capsys):
    def say(rows):
        for each in rows:
            each.verdict = verdict

    monkeypatch.setattr(workarounds, "check", say)  # it takes minutes
    monkeypatch.setattr(sys, "argv", ["workarounds.py", "--check"])
    if code:
        with pytest.raises(SystemExit) as ended:
            workarounds.main()
        assert ended.value.code == code
    else:
        workarounds.main()
    assert capsys.readouterr().out.count(f"| {verdict}") == len(upstream.workarounds())


def test_a_file_that_cannot_be_written_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["workarounds.py", "--json", str(tmp_path)])
    with pytest.raises(SystemExit, match="73"):
        workarounds.main()
    assert "cannot write" in capsys.readouterr().err
