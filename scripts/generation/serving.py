# SPDX-License-Identifier: Apache-2.0
"""What a server answers over HTTP, held against the model that it should serve.

It is asked in the form of OpenAI's chat completions:
https://platform.openai.com/docs/api-reference/chat
"""

import json
import os
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

import torch

from common import Exit, stop
from core.chat import Conversation
from generation.answering import Answerer
from generation.comparing import ROUNDING

API_KEY = "OPENAI_API_KEY"  # variable with the key of a server that asks for one
TIMEOUT = 300  # seconds in which a server may answer


def ask(url: str, name: str, conversation: Conversation, answerer: Answerer) -> Any:
    """Return the chat completion of a server. Raises SystemExit with 69 if it has none.

    Args:
        name: of the model on the server.
    """
    body: dict[str, Any] = {"model": name, "messages": conversation.messages, "temperature": 0}
    body["max_tokens"] = answerer.max_new_tokens
    if answerer.template.settings:
        body["chat_template_kwargs"] = dict(answerer.template.settings)
    headers = {"Content-Type": "application/json"}
    if API_KEY in os.environ:
        headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            return json.loads(response.read())
    except (OSError, HTTPException, ValueError) as error:
        stop(Exit.NO_HUB, f"{url}: no answer of {name}: {error}")


def text_of(reply: Any) -> str:
    """Return the answer in a chat completion."""
    return (reply["choices"][0]["message"]["content"] or "").strip()


def find_difference(answerer: Answerer, conversation: Conversation, reply: Any) -> Iterator[str]:
    """Yield what the model here would not say of a chat completion, if there is anything.

    Where two tokens are closer than rounding, either may come first. So what counts is whether the
    model here finds each token of the answer as likely as the likeliest, and its end too.
    """
    inputs, options = answerer.prepare([conversation])
    prompt = inputs["input_ids"]
    number = (reply.get("usage") or {}).get("prompt_tokens")
    has_ended = reply["choices"][0]["finish_reason"] == "stop"
    ends = options["eos_token_id"] if has_ended else []
    if number and number != prompt.shape[1]:
        yield (
            f"the server makes {number} tokens of the prompt, training made {prompt.shape[1]}: its "
            "chat template, the variables of that, or its tokenizer differ"
        )
    elif not could_be_said(answerer, prompt, text_of(reply), ends):
        yield f"the server says {text_of(reply)[:120]!r}, and the model here would not"


@torch.inference_mode()
def could_be_said(answerer: Answerer, prompt: torch.Tensor, text: str, ends: Sequence[int]) -> bool:
    """Return whether each token of a text, and one of those that end it, is nearly the likeliest.

    Args:
        prompt: its tokens, [1, tokens].
        ends: none for a text that was cut.
    """
    tokenizer: Any = answerer.template.tokenizer
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = torch.tensor([tokens], dtype=prompt.dtype, device=prompt.device)
    output = answerer.model(input_ids=torch.cat([prompt, answer], dim=1))
    logits = output.logits[0, prompt.shape[1] - 1 :].float()
    bound = 2 * ROUNDING[answerer.model.dtype] * logits.abs().max()
    is_near = logits >= logits.max(-1, keepdim=True).values - bound
    said = [bool(is_near[place, token]) for place, token in enumerate(tokens)]
    return all(said) and (not ends or bool(is_near[-1, ends].any()))
