# SPDX-License-Identifier: Apache-2.0
"""What is trained on is what TRL's mask has, for every chat template that comes with TRL.

TRL trains on what its own variants of the templates mark with {% generation %}. With such a variant
as --chat_template, the same tokens are trained on here. With the template that the model comes
with, they are found by the prompts that generation would use. Where the two differ, the case and
the kind of the difference are in trl_differences.json.
"""

import json
from pathlib import Path

import trl
from trl.chat_template_utils import get_training_chat_template

from chat_templates import CONVERSATIONS, tokenizer_of
from core.chat import ChatTemplate, make_conversation, tokenize_conversation

FOLDER = Path(trl.__file__).parent / "chat_templates"
PINNED = Path(__file__).with_name("trl_differences.json")
# Each kind of difference, and why it is right here
KINDS = {
    "white space": "after the end of a turn the model no longer speaks: what follows is the "
    "template's",
    "in the prompt": "the generation prompt already has these tokens",
    "not in the prompt": "the generation prompt lacks these tokens, so the model has to write them",
    "rewritten": "the template writes an earlier turn in another way than generation would",
    "other text": "TRL's variant of the template writes another text",
    "only here": "TRL has no variant of the template, or it refuses the conversation",
    "refused": "the template drops what was said, or no answer follows from a generation prompt",
    "both refuse": "the template cannot write the conversation",
}


def trained_here(template, name):
    """Return the row that this project makes of a conversation."""
    conversation = make_conversation(*CONVERSATIONS[name])
    tokenizer = tokenizer_of(template)
    return tokenize_conversation(conversation, ChatTemplate(tokenizer), 10**6)


def trained_by_trl(template, name):
    """Return the tokens and the mask of what TRL trains on."""
    tokenizer = tokenizer_of(template)
    messages, tools = CONVERSATIONS[name]
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        chat_template=get_training_chat_template(tokenizer) or template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def difference(template, name):
    """Return the kind of the difference for a template and a conversation; "" if there is none."""
    try:
        row = trained_here(template, name)
    except Exception:  # a template may raise anything
        row = None
    try:
        ids, mask = trained_by_trl(template, name)
    except Exception:
        return "only here" if row else "both refuse"
    if row is None:
        return "refused"
    if row["rewritten"]:
        return "rewritten"
    if row["input_ids"] != ids:
        return "other text"
    return kind_of_masks(template, name, row, mask)


def kind_of_masks(template, name, row, mask):
    """Return how two masks of the same tokens differ; "" if they do not."""
    here = [label != -100 for label in row["labels"]]
    tokenizer = tokenizer_of(template)
    only_trl = [i for i, wanted in enumerate(mask) if wanted and not here[i]]
    only_here = [i for i, wanted in enumerate(mask) if not wanted and here[i]]
    said = [i for i in only_trl if tokenizer.decode([row["input_ids"][i]]).strip()]
    if only_here:
        return "not in the prompt"
    for i in said:  # What is trained on here begins where the generation prompt ends
        following = next((j for j in range(i, len(here)) if j not in only_trl), i)
        assert here[following], f"{name}: TRL trains on what is no part of a turn here"
    if said:
        return "in the prompt"
    return "white space" if only_trl else ""


def differences():
    """Return {template: {conversation: kind}} of all differences."""
    found = {}
    for path in sorted(FOLDER.glob("*.jinja")):
        template = path.read_text()
        kinds = {name: difference(template, name) for name in CONVERSATIONS}
        found[path.stem] = {name: kind for name, kind in kinds.items() if kind}
    return found


def test_what_is_trained_on_differs_from_trl_only_where_it_is_pinned():
    assert differences() == json.loads(PINNED.read_text())


def test_every_kind_of_difference_is_explained():
    pinned = json.loads(PINNED.read_text())
    kinds = {kind for kinds in pinned.values() for kind in kinds.values()}
    assert kinds == set(KINDS)


if __name__ == "__main__":
    PINNED.write_text(json.dumps(differences(), indent=1, ensure_ascii=False) + "\n")
