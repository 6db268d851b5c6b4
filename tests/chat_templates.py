# SPDX-License-Identifier: Apache-2.0
"""Chat templates to be tested: a tokenizer for each, and conversations that show what it does.

The tokenizer has a token for each byte and for each control token of the template, so that nothing
in the text is hidden by merged tokens.
"""

import functools
import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKEN = re.compile(
    r"<\|[^<>\s|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance)>|</?think>|</?tool_call>|</s>|\[/?[A-Z_]+\]"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # as in most tokenizers

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}


def said_by(role, content, **keys):
    """Return a message."""
    return {"role": role, "content": content, **keys}


SYSTEM = said_by("system", "Be brief.")
HELLO = [said_by("user", "Hi."), said_by("assistant", "Hello.")]
BYE = [said_by("user", "And?"), said_by("assistant", "Bye.")]
REASONED_HELLO = [HELLO[0], {**HELLO[1], "reasoning_content": "Be polite."}]
REASONED_BYE = [BYE[0], {**BYE[1], "reasoning_content": "It ends."}]
CALL = [
    said_by("user", "Rome?"),
    said_by(
        "assistant",
        "",
        tool_calls=[
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        ],
    ),
    said_by("tool", "Sun", name="weather"),
    said_by("assistant", "It is sunny."),
]
# {name: (messages, tools)}
CONVERSATIONS = {
    "one turn": (HELLO, []),
    "system": ([SYSTEM, *HELLO], []),
    "two turns": ([*HELLO, *BYE], []),
    "system, two turns": ([SYSTEM, *HELLO, *BYE], []),
    "reasoning": (REASONED_HELLO, []),
    "reasoning, two turns": ([*REASONED_HELLO, *REASONED_BYE], []),
    "tool": (CALL, [WEATHER]),
    "tool, two turns": ([*CALL, *BYE], [WEATHER]),
}


@functools.lru_cache(maxsize=32)
def tokenizer_of(template):
    """Return a tokenizer with a chat template, and with a token for each of its control tokens.

    It is made once, which takes more time than all that is asked of it: leave it as it is.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    added = []
    for token in sorted(set(CONTROL_TOKEN.findall(template))):
        added.append(AddedToken(token, special=token not in NOT_SPECIAL))
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    return tokenizer


def show(tokenizer, ids, is_trained_on):
    """Return tokens as text, with the parts that are trained on in [[ ]]."""
    parts = []
    inside = False
    for token, trained_on in zip([*ids, None], [*is_trained_on, False], strict=True):
        if bool(trained_on) != inside:
            inside = bool(trained_on)
            parts.append("[[" if inside else "]]")
        if token is not None:
            parts.append(tokenizer.decode([token]))
    return "".join(parts)
