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
# Kinds of difference, and why each is right here. "white space": what follows the end of a turn is
# the template's. "in the prompt", "not in the prompt": the generation prompt has these tokens, or
# the model has to write them. "rewritten": the template writes an earlier turn in another way than
# generation would. "other text", "only here": TRL's variant writes another text, refuses, or is
# missing. "refused", "both refuse": the template drops what was said, or cannot write it


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


if __name__ == "__main__":
    PINNED.write_text(json.dumps(differences(), indent=1, ensure_ascii=False) + "\n")
