# SPDX-License-Identifier: Apache-2.0
"""Rows with tools, reasoning and weights are trained on under a template that writes them, and the
result answers by the same template."""

import json

from chat_templates import CALL, HELLO, WEATHER
from launching import read_metrics, read_rows, recipe, script, write_rows

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


def test_they_are_trained_on_and_the_result_answers_by_the_same_template(tiny, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", rows]
    words += ["--output_dir", tmp_path / "run", "--max_steps", 2]
    template = ["--chat_template", tmp_path / "template.jinja"]
    settings = ["--chat_template_kwargs", '{"greeting": "Ciao. "}']
    done = recipe(*words, *template, *settings, code=0)
    shown = " ".join(done.output.split())
    assert "Ciao. [{" in shown and '[[weather{"city": "Rome"}<|end_of_turn|>]]' in shown
    assert "Sun<|end_of_turn|>" in shown and "[[It is sunny.<|end_of_turn|>]]" in shown
    steps, _ = read_metrics(tmp_path / "run")
    assert steps[-1]["step"] == 2
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == TEMPLATE
    ask = ["--file", rows, "--max_new_tokens", 4, "--output", tmp_path / "answers.jsonl"]
    script("generate", tmp_path / "run", *ask, code=0)
    first = read_rows(tmp_path / "answers.jsonl")[0]
    assert first["reference"] == "It is sunny." and first["tools"] == [WEATHER]
    assert first["messages"][-1]["role"] == "tool"
