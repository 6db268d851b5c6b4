# SPDX-License-Identifier: Apache-2.0
"""A chat template is written in Ollama's language if it can be, and otherwise refused."""

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from exporting import turns

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
# What Go 1.19 made of the templates and conversations, by the program in the same folder
BY_GO = Path(__file__).parents[2] / "data" / "go_templates" / "rendered.json"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ASKED = [{"role": "user", "content": "Hi."}]


def renderer(template):
    """Return what renders messages with a chat template, as exporting.gguf_folder does."""

    def render(messages, adds_generation_prompt):
        try:
            texts, _ = render_jinja_template(
                [list(messages)],
                chat_template=template,
                add_generation_prompt=adds_generation_prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception as error:
            raise ValueError(str(error)) from error
        return texts[0]

    return render


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_of_each_family_can_be_written(family):
    render = renderer((TEMPLATES / f"{family}.jinja").read_text())
    found = turns.find_turns(render)
    assert turns.find_difference(found, render) is None
    assert turns.read_go(found.to_go()) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_go_itself_writes_what_is_computed_here(family):
    recorded = json.loads(BY_GO.read_text())[family]
    found = turns.find_turns(renderer((TEMPLATES / f"{family}.jinja").read_text()))
    assert found.to_go() == recorded["template"]
    conversations = list(turns.plain_conversations(has_system=True))
    assert [found.render(messages) for messages in conversations] == recorded["texts"]


def test_each_plain_conversation_is_written_as_by_the_chat_template():
    render = renderer(PLAIN)
    found = turns.find_turns(render)
    conversations = list(turns.plain_conversations(has_system=True))
    assert len(conversations) >= 8
    for messages in conversations:
        assert found.render(messages) == render(messages, True)


def test_texts_are_cut_where_the_author_ends_a_turn():
    found = turns.find_turns(renderer(PLAIN))
    assert found.lead == "<s>"
    assert found.before == {
        "system": "<|system|>",
        "user": "<|user|>",
        "assistant": "<|assistant|>",
    }
    assert set(found.after.values()) == {"<|end|>\n"}
    assert found.generation == "<|assistant|>"


def test_a_default_system_message_is_only_written_without_another_one():
    template = "{% if messages[0].role != 'system' %}<|system|>Be kind.<|end|>\n{% endif %}" + PLAIN
    template = template.replace("{{ bos_token }}", "")
    render = renderer(template)
    found = turns.find_turns(render)
    assert "Be kind." in found.no_system
    assert turns.find_difference(found, render) is None
    assert "{{- if not .System }}" in found.to_go()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_llama_cpp_adds_is_left_out_once(family):
    render = renderer((TEMPLATES / f"{family}.jinja").read_text())
    bos = "<s>" if render(ASKED, True).startswith("<s>") else ""
    shortened = turns.find_turns(render).without_start(bos)
    for messages in turns.plain_conversations(has_system=True):
        assert bos + shortened.render(messages) == render(messages, True)


def test_white_space_that_the_template_strips_is_a_note():
    render = renderer(PLAIN.replace("m.content", "m.content | trim"))
    notes = list(turns.find_notes(turns.find_turns(render), render))
    assert any("strips white space" in note for note in notes)
    render = renderer(PLAIN)
    assert not list(turns.find_notes(turns.find_turns(render), render))


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("m.content", "m.content | upper"),
        PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
        PLAIN.replace("<|end|>", "<|end {{ loop.index }}|>"),
        PLAIN.replace("m.content", "m.content | replace('<', '&lt;')"),
        PLAIN.replace("messages", "messages[-1:]"),
    ],
    ids=["capitals", "twice", "numbered", "escaped", "last message alone"],
)
def test_a_template_that_cannot_be_written_is_not_taken_for_one_that_can(template):
    render = renderer(template)
    try:
        found = turns.find_turns(render)
    except ValueError:
        return
    assert turns.find_difference(found, render) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [("<|user|>", "<|human|>"), ("$message.Content", "$message.Role"), ("range", "with")],
)
def test_a_template_that_somebody_changed_is_not_read_as_the_same(before, after):
    found = turns.find_turns(renderer(PLAIN))
    changed = found.to_go().replace(before, after)
    try:
        assert turns.read_go(changed) != found
    except ValueError as error:
        assert str(error)
