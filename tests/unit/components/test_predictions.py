# SPDX-License-Identifier: Apache-2.0
"""What a model has written is kept as it is, and shown on one line."""

import json

from components.predictions import SHOWN_LETTERS, show_prediction, write_predictions

WRITTEN = "größer\n\x1b[31mred\t1"


def test_a_text_controls_no_terminal_and_has_one_line(capsys):
    show_prediction("a\nb", WRITTEN, "c")
    assert capsys.readouterr().out == "a b -> größer [31mred 1 (should be: c)\n"


def test_long_texts_are_shown_in_part(capsys):
    show_prediction("a", "b" * 1000, "c" * 1000)
    out = capsys.readouterr().out
    assert out.startswith(f"a -> {'b' * SHOWN_LETTERS} (") and out.count("c") == SHOWN_LETTERS


def test_the_file_has_them_as_they_are(tmp_path):
    path = tmp_path / "predictions-1.jsonl"
    write_predictions([{"row": 1, "answer": WRITTEN}, {"row": 2, "answer": ""}], path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "größer" in lines[0]
    assert [json.loads(line)["answer"] for line in lines] == [WRITTEN, ""]
