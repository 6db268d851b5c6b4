# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes is compared with what was said: nothing is lost in silence."""

import pytest

from chat_templates import CALL, HELLO, WEATHER, said_by, show, tokenizer_of
from components.chat import tokenize_conversation
from components.chat_template import ChatTemplate, check_other_keys
from components.columns import TrackedRow
from components.conversations import make_conversation

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
MARKED_TWICE = MARKED.replace(
    "{{ m.content }}<|end|>{% endgeneration %}",
    "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgeneration %}",
)
MARKED_WITHOUT_ITS_END = MARKED.replace(
    "{{ m.content }}<|end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|end|>"
)
WRITES_ALL = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
ARGUMENTS = "call.function.arguments | tojson"


def template_of(text, **settings):
    return ChatTemplate(tokenizer_of(text + "<|end|><|user|><|assistant|><|tool|>"), settings)


def trained_text(text, messages, tools=(), **settings):
    """Return the text of a conversation, with the parts that are trained on in [[ ]]."""
    template = template_of(text, **settings)
    template.tokenizer.chat_template = text
    conversation = make_conversation(messages, list(tools))
    row = tokenize_conversation({}, conversation, template, 10**6)
    is_trained_on = [label != -100 for label in row["labels"]]
    return show(template.tokenizer, row["input_ids"], is_trained_on)


def with_weights(*weights):
    """Return a conversation with one answer of each of these weights."""
    messages = []
    for number, weight in enumerate(weights):
        messages += [said_by("user", "Hi."), said_by("assistant", f"No. {number}", weight=weight)]
    return messages


# ---- What is trained on ----
@pytest.mark.parametrize(
    "template",
    [PLAIN, MARKED, MARKED_TWICE, MARKED_WITHOUT_ITS_END],
    ids=["", "marked", "twice", "without its end"],
)
@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (1, 0), (1, 0, 1)], ids=str)
def test_an_answer_of_weight_0_is_the_only_one_that_is_not_trained_on(template, weights):
    expected = ""
    for number, weight in enumerate(weights):
        answer = f"No. {number}<|end|>"
        expected += "<|user|>Hi.<|end|><|assistant|>" + (f"[[{answer}]]" if weight else answer)
    assert trained_text(template, with_weights(*weights)) == expected


@pytest.mark.parametrize(
    ("ending", "learned"),
    [
        ("{% endgeneration %}<|end|>\n", "[[Hello.<|end|>]]\n"),
        ("{% endgeneration %}\n<|end|>", "[[Hello.\n<|end|>]]"),
        ("<|end|>\n{% endgeneration %}", "[[Hello.<|end|>\n]]"),
        ("{% endgeneration %}<|tool|>.<|end|>", "[[Hello.]]<|tool|>.<|end|>"),  # more of the turn
        ("{% endgeneration %}", "[[Hello.]]"),  # the token that opens the next turn is no end
    ],
    ids=["white space after", "before", "inside", "more", "none"],
)
def test_an_end_of_turn_that_is_not_marked_is_trained_on(ending, learned):
    template = MARKED.replace("<|end|>{% endgeneration %}", ending.replace("\n", "{{ '\n' }}"))
    text = trained_text(template, HELLO * 2)
    assert text.startswith(f"<|user|>{HELLO[0]['content']}<|end|><|assistant|>{learned}<|user|>")
    if "<|end|>" in learned.partition("]]")[0]:
        assert text.endswith(f"<|assistant|>{learned}")


def test_marks_that_cannot_be_told_apart_are_refused_if_not_all_answers_are_trained_on():
    rewrites = "{{ messages | length }}" + MARKED_TWICE
    assert trained_text(rewrites, with_weights(1, 1)).endswith("[[No. 1<|end|>]]")
    with pytest.raises(ValueError, match="does not show which of its text belongs to which"):
        trained_text(rewrites, with_weights(0, 1))


@pytest.mark.parametrize("template", [MARKED, MARKED_TWICE], ids=["once", "twice"])
def test_a_marked_turn_that_loses_its_reasoning_is_not_trained_on(template):
    drops = template.replace(
        "{% generation %}",
        "{% generation %}{% if loop.last %}({{ m.reasoning_content }}) {% endif %}",
        1,
    )
    reasoned = [HELLO[0], HELLO[1] | {"reasoning_content": "hm"}]
    text = trained_text(drops, reasoned * 2)
    assert text.count("[[") == 1 and text.endswith("[[(hm) Hello.<|end|>]]")


def test_a_template_that_generation_would_prompt_otherwise_says_what_to_do():
    prompts = PLAIN.replace("'<|assistant|>'", "'<|assistant|><think>'")
    with pytest.raises(ValueError, match="message 2 .assistant. does not follow from the"):
        trained_text(prompts, HELLO)


# ---- What the template drops ----
@pytest.mark.parametrize(
    ("template", "messages", "tools", "word"),
    [
        (PLAIN, CALL, [WEATHER], "tool weather"),
        (PLAIN, CALL, [], "tool_calls"),
        (PLAIN, [HELLO[0], HELLO[1] | {"reasoning_content": "hm"}], [], "reasoning_content"),
        ("{{ messages[-1].content }}", HELLO, [], "content"),
        (PLAIN, [HELLO[0] | {"name": "Ann"}, HELLO[1]], [], "name"),
    ],
    ids=["tools", "calls", "reasoning", "content", "name"],
)
def test_what_was_said_and_is_not_written_is_named(template, messages, tools, word):
    with pytest.raises(ValueError, match=f"has (the )?{word}"):
        trained_text(template, messages, tools)


@pytest.mark.parametrize("question", ["Hello.", "lo", "assistant", "a"])
def test_a_content_is_missed_although_its_text_is_elsewhere(question):
    """In the answer, or in what the template writes of its own."""
    drops = "{% for m in messages if m.role != 'user' %}<|assistant|>{{ m.content }}{% endfor %}"
    messages = [said_by("user", question), said_by("assistant", "Hello.")]
    with pytest.raises(ValueError, match=r"message 1 .user. has content, which the chat template"):
        trained_text(drops, messages)


def test_a_content_that_others_repeat_is_not_missed_where_it_is_written():
    messages = [said_by("user", "a"), said_by("assistant", "a"), said_by("user", "aa a")]
    messages.append(said_by("assistant", "a"))
    assert trained_text(PLAIN, messages).count("[[a<|end|>]]") == 2
    twice = "{{ messages[0].content }}" + PLAIN
    assert trained_text(twice, HELLO).startswith("Hi.<|user|>Hi.")


def test_dropped_keys_that_describe_a_message_are_noted_in_the_row():
    row = TrackedRow({"source": "web"})
    conversation = make_conversation([HELLO[0] | {"id": "x7", "time": 12}, HELLO[1]], [])
    template = template_of(PLAIN)
    check_other_keys(row, conversation, template.render(conversation), template)
    assert row.unread() == ["id (of messages)", "time (of messages)", "source"]


# ---- Arguments of calls ----
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (ARGUMENTS, '{"city": "Rome"}'),
        ("call.function.arguments", '{"city": "Rome"}'),  # an object would be Python's text
        ("'' + call.function.arguments", '{"city": "Rome"}'),  # an object would be a TypeError
    ],
)
def test_arguments_become_json_whatever_the_template_expects(written, expected):
    template = WRITES_ALL.replace(ARGUMENTS, written)
    assert f"[[weather{expected}<|end|>]]" in trained_text(template, CALL, [WEATHER])
