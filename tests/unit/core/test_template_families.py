# SPDX-License-Identifier: Apache-2.0
"""What is trained on is what the author's marks say, for the families of templates most used.

Each file of tests/data/chat_templates is a family's public format in words of this project's own,
with {% generation %} around what the model has to write. transformers' mask of it says what is to
be trained on. The same has to be found with the marks, and without them, as a model comes. Where
that is not so, the case and the kind of the difference are in differences.json.
"""

import copy
import json
import re
from pathlib import Path

import pytest
from jinja2 import TemplateError

from chat_templates import (
    BYE,
    CONVERSATIONS,
    HELLO,
    REASONED_BYE,
    SYSTEM,
    WEATHER,
    said_by,
    tokenizer_of,
)
from core.chat import ChatTemplate, make_conversation, tokenize_conversation

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
PINNED = FOLDER / "differences.json"
MARK = re.compile(r"\{%(-?)\s*((?:end)?generation)\s*(-?)%\}")
TAKES_JSON = ("deepseek_v3_1",)  # Arguments of calls have to be JSON text
VARIANTS = ("plain", "marked")
SWITCHED = {  # {family: a setting that changes the generation prompt}
    "qwen3": {"enable_thinking": False},
    "smollm3": {"enable_thinking": False},
    "glm4_5": {"enable_thinking": False},
    "deepseek_v3_1": {"thinking": True},
}
DROPPED = re.compile(r"has (?:the )?(\w+).*, which the chat template drops")


def called(city, identity):
    """Return the call of a tool."""
    function = {"name": "weather", "arguments": {"city": city}}
    return {"type": "function", "id": identity, "function": function}


def ask_both(first, second):
    """Return messages in which two tools are called at once, by calls with these ids."""
    return [
        said_by("user", "Rome, Oslo?"),
        said_by("assistant", "", tool_calls=[called("Rome", first), called("Oslo", second)]),
        said_by("tool", "Sun", name="weather", tool_call_id=first),
        said_by("tool", "Rain", name="weather", tool_call_id=second),
        said_by("assistant", "Rome is dry."),
    ]


def ask_one(**keys):
    """Return messages in which a tool is called, in a message with these keys too."""
    call = {**said_by("assistant", "", tool_calls=[called("Rome", "aaaaaaaa1")]), **keys}
    return [
        said_by("user", "Rome?"),
        call,
        said_by("tool", "Sun", name="weather", tool_call_id="aaaaaaaa1"),
        said_by("assistant", "It is sunny."),
    ]


REASONED_WHY = [
    said_by("user", "Why?"),
    said_by("assistant", "To greet.", reasoning_content="They ask."),
]
REASONED_CALL = ask_one(reasoning_content="Ask a tool.")
REASONED_CALL[-1]["reasoning_content"] = "It is clear."
CASES = {
    **CONVERSATIONS,
    "system, tool": ([SYSTEM, *ask_one()], [WEATHER]),
    "several calls": (ask_both("aaaaaaaa1", "bbbbbbbb2"), [WEATHER]),
    "calls named by ids": (ask_both("functions.weather:0", "functions.weather:1"), [WEATHER]),
    "text and call": (ask_one(content="Let me look."), [WEATHER]),
    "reasoning, tool": (REASONED_CALL, [WEATHER]),
    "reasoning, tool, two turns": ([*REASONED_CALL, *REASONED_BYE], [WEATHER]),
    "reasoning at last": ([*HELLO, *REASONED_BYE], []),
    "reasoning between": ([*HELLO, *REASONED_WHY, *BYE], []),
}


def template_of(family, variant):
    """Return a family's template, with marks, or plain as its models have it."""
    marked = (FOLDER / f"{family}.jinja").read_text()
    return without_marks(marked) if variant == "plain" else marked


def without_marks(template):
    """Return a template without {% generation %}.

    A comment replaces each mark, since it takes the same white space away.
    """
    return MARK.sub(r"{#\1 mark \3#}", template)


def conversation_of(case):
    """Return a conversation of CASES."""
    return make_conversation(*CASES[case])


def with_json_arguments(conversation):
    """Return a conversation whose calls have their arguments as JSON text."""
    written = copy.deepcopy(conversation)
    for message in written.messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return written


def row_of(family, variant, conversation, settings=None):
    """Return the row that this project makes of a conversation."""
    template = ChatTemplate(tokenizer_of(template_of(family, variant)), settings or {})
    return tokenize_conversation(conversation, template, 10**6)


def reference_of(family, conversation, settings=None):
    """Return the tokens that transformers makes of a conversation, and its mask."""
    if family in TAKES_JSON:
        conversation = with_json_arguments(conversation)
    encoded = tokenizer_of(template_of(family, "marked")).apply_chat_template(
        conversation.messages,
        tools=conversation.tools or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **(settings or {}),
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def runs_of(mask):
    """Return (start, end) of each part of a mask that is on."""
    runs = []
    for place, is_on in enumerate(mask):
        if is_on and (place == 0 or not mask[place - 1]):
            runs.append([place, place])
        if is_on:
            runs[-1][1] = place + 1
    return [tuple(run) for run in runs]


def trained_in(row):
    """Return (start, end) of each part of a row that is trained on."""
    return runs_of([label != -100 for label in row["labels"]])


def texts_of(family, ids, runs):
    """Return the texts of parts of a row."""
    tokenizer = tokenizer_of(template_of(family, "marked"))
    return [tokenizer.decode(ids[start:end]) for start, end in runs]


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_are_around_what_the_model_has_to_write(family):
    texts = json.loads((FOLDER / "trained_texts.json").read_text())[family]

    assert "system, two turns" in texts
    for case, expected in texts.items():
        ids, mask = reference_of(family, conversation_of(case))
        assert texts_of(family, ids, runs_of(mask)) == expected, case


# ---- What is trained on ----
def difference(family, variant, case, settings=None):
    """Return the kind of a row's difference from transformers' mask; "" if there is none."""
    conversation = conversation_of(case)
    try:
        ids, mask = reference_of(family, conversation, settings)
    except TemplateError:
        with pytest.raises((TemplateError, ValueError)):
            row_of(family, variant, conversation, settings)
        return "both refuse"
    try:
        row = row_of(family, variant, conversation, settings)
    except ValueError as error:
        dropped = DROPPED.search(str(error))
        if dropped:
            return f"drops {dropped[1]}"
        assert "has no answer" in str(error)
        return "no answer"
    return ", ".join(kinds_of_row(family, row, ids, mask))


def kinds_of_row(family, row, ids, mask):
    """Return the kinds in which a row differs; parts of turns that are trained on are an error."""
    kinds = []
    eos_token = tokenizer_of(template_of(family, "marked")).eos_token_id
    if row["input_ids"] == [*ids, eos_token]:
        assert row["labels"][-1] == eos_token
        ids = row["input_ids"]
        mask = [*mask, 1]
        kinds.append("closed")
    assert row["input_ids"] == ids
    missing = set(runs_of(mask)) - set(trained_in(row))
    assert set(trained_in(row)) <= set(runs_of(mask)), texts_of(family, ids, trained_in(row))
    assert len(missing) == row["rewritten"]
    if missing:
        kinds.append("rewritten")
    return kinds


def differences():
    """Return {family: {variant: {conversation: kind}}} of all differences."""
    found = {}
    for family in FAMILIES:
        found[family] = {variant: kinds_of(family, variant) for variant in VARIANTS}
    for family, settings in SWITCHED.items():
        switched = {variant: kinds_of(family, variant, settings) for variant in VARIANTS}
        found[f"{family} {json.dumps(settings)}"] = switched
    return found


def kinds_of(family, variant, settings=None):
    """Return {conversation: kind} of the differences of a variant of a template."""
    kinds = {case: difference(family, variant, case, settings) for case in CASES}
    return {case: kind for case, kind in kinds.items() if kind}


def test_what_is_trained_on_differs_from_the_marks_only_where_it_is_pinned():
    assert differences() == json.loads(PINNED.read_text())


if __name__ == "__main__":
    PINNED.write_text(json.dumps(differences(), indent=1, ensure_ascii=False) + "\n")
