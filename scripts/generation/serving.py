# SPDX-License-Identifier: Apache-2.0
"""What a server answers over HTTP, held against the model that it should serve.

It is asked in the form of OpenAI's chat completions:
https://platform.openai.com/docs/api-reference/chat
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from common import Exit, first_line, stop
from core.data import in_one_line
from generation.answering import REPLACEMENT, Answerer
from generation.comparing import ROUNDING
from generation.rows import Question

API_KEY = "OPENAI_API_KEY"  # variable with the key of a server that asks for one
TIMEOUT = 300  # seconds in which a server may answer
LONGEST_SHOWN = 120  # characters of an answer in a message


@dataclass(frozen=True)
class Served:
    """A server's answer to one question.

    Attributes:
        ended: whether the model ended its turn; otherwise the answer was cut.
        num_prompt_tokens: of the question; 0 if the server does not say.
    """

    text: str
    ended: bool
    num_prompt_tokens: int


def ask_server(
    url: str, name: str, questions: Sequence[Question], answerer: Answerer
) -> list[Served]:
    """Return the likeliest answers of a server. Raises SystemExit with 69 if it has none.

    Args:
        name: of the model on the server.
    """
    answers = []
    for question in questions:
        body: dict[str, Any] = {
            "model": name,
            "messages": question.conversation.messages,
            "temperature": 0,
            "max_tokens": answerer.max_new_tokens,
        }
        if answerer.template.settings:
            body["chat_template_kwargs"] = dict(answerer.template.settings)
        try:
            reply = exchange(f"{url}/chat/completions", body)
            answers.append(to_served(reply))
        except HTTPError as error:
            words = in_one_line(error.read().decode(errors="replace"))
            why = f"{first_line(error)} {words[:LONGEST_SHOWN]}"
            stop(Exit.NO_HUB, f"{url}: no answer of {name}: {why}")
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            stop(Exit.NO_HUB, f"{url}: no answer of {name}: {first_line(error)}")
    return answers


def exchange(url: str, body: Mapping[str, Any]) -> Any:
    """Return what a server answers to a question, as JSON. Raises OSError or ValueError."""
    headers = {"Content-Type": "application/json"}
    if API_KEY in os.environ:
        headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=TIMEOUT) as response:
        return json.loads(response.read())


def to_served(reply: Any) -> Served:
    """Return a chat completion as an answer. Raises LookupError or TypeError for what is none."""
    (choice,) = reply["choices"]
    text = choice["message"]["content"] or ""
    usage = reply.get("usage") or {}
    ended = choice["finish_reason"] == "stop"
    return Served(text, ended, usage.get("prompt_tokens") or 0)


def find_difference(
    answerer: Answerer, question: Question, ours: str, served: Served
) -> str | None:
    """Return how a server's answer differs from that of the model here, or None.

    Where two tokens are closer than rounding, either may come first. So what counts is whether the
    model here finds each token of another answer as likely as the likeliest, and its end too.
    """
    inputs, options = answerer.prepare([question.conversation])
    prompt = inputs["input_ids"]
    if served.num_prompt_tokens not in (0, prompt.shape[1]):
        return (
            f"the server makes {served.num_prompt_tokens} tokens of the prompt, training made "
            f"{prompt.shape[1]}: its chat template, the variables of that, or its tokenizer differ"
        )
    theirs = served.text.strip().rstrip(REPLACEMENT)
    if theirs == ours.rstrip(REPLACEMENT):
        return None
    ends = options["eos_token_id"] if served.ended else []
    if could_be_said(answerer, prompt, theirs, ends):
        return None
    theirs = theirs[:LONGEST_SHOWN]
    ours = ours[:LONGEST_SHOWN]
    return f"it says {theirs!r}, but the model here {ours!r}"


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
    for place, token in enumerate(tokens):
        if not is_near[place, token]:
            return False
    return not ends or bool(is_near[-1, ends].any())
