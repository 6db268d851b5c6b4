# SPDX-License-Identifier: Apache-2.0
"""Rows with tools, reasoning and weights are trained on under a template that writes them, and the
result answers by the same template."""

import json
import sys

import pytest

from chat_templates import CALL, HELLO, WEATHER
from launching import REPO, read_metrics, recipe, run

# It writes what it is told to greet with, tools, reasoning and calls, by tokens of the tiny model
TEMPLATE = (
    "{{ greeting }}{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end_of_turn|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
REASONED = [HELLO[0], HELLO[1] | {"thinking": "Be polite."}]
ROWS = [
    {"messages": CALL, "tools": json.dumps([WEATHER["function"]])},
    {"messages": REASONED},
    {"messages": [HELLO[0], HELLO[1] | {"weight": 0}, *HELLO]},
    {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]},
]


@pytest.fixture
def call(tiny, tmp_path):
    """The arguments of a run of two steps on ROWS."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    return [*words, "--output_dir", tmp_path / "run", "--max_steps", 2]


def test_they_are_trained_on_and_the_result_answers_by_the_same_template(call, tmp_path):
    template = ["--chat_template", tmp_path / "template.jinja"]
    settings = ["--chat_template_kwargs", '{"greeting": "Ciao. "}']
    done = recipe(*call, *template, *settings)
    assert done.returncode == 0, done.output
    shown = " ".join(done.output.split())
    assert "Ciao. [{" in shown and '[[weather{"city": "Rome"}<|end_of_turn|>]]' in shown
    assert "Sun<|end_of_turn|>" in shown and "[[It is sunny.<|end_of_turn|>]]" in shown
    steps, _ = read_metrics(tmp_path / "run")
    assert steps[-1]["step"] == 2
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == TEMPLATE
    ask = ["--file", tmp_path / "rows.jsonl", "--max_new_tokens", 4]
    ask += ["--output", tmp_path / "answers.jsonl"]
    answered = run(sys.executable, REPO / "scripts" / "generate.py", tmp_path / "run", *ask)
    assert answered.returncode == 0, answered.output
    first = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    assert first["reference"] == "It is sunny." and first["tools"] == [WEATHER]
    assert first["messages"][-1]["role"] == "tool"


def test_a_template_that_drops_them_names_each_row(call):
    done = recipe(*call, "--dry_run")
    assert done.returncode == 65, done.output
    for word in ("line 1", "weather", "line 2", "thinking"):
        assert word in done.output, done.output


def test_learn_last_trains_on_the_last_answer_only(call, tmp_path):
    template = ["--chat_template", tmp_path / "template.jinja"]
    done = recipe(*call, *template, "--learn", "last", "--dry_run")
    assert done.returncode == 0, done.output
    assert "[[weather" not in done.output and "[[It is sunny." in " ".join(done.output.split())
