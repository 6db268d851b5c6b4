# SPDX-License-Identifier: Apache-2.0
"""Answers of a model to conversations: to many at once, or to one while it is shown."""

import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import StoppingCriteriaList, TextIteratorStreamer

from core.chat import ChatTemplate, Conversation, fit_arguments
from core.generation import answer_in, greedy_options, listed_stop_tokens, most_positions
from tasks.illustrated import IMAGE, IllustratedTemplate

# What is raised for a prompt that is too long, that the chat template refuses, or for which the
# memory does not suffice
UNANSWERED = (ValueError, TemplateError, torch.OutOfMemoryError)
STOPPED = " [stopped]"  # by the user
CUT = " [cut off at the limit of tokens]"
# What a terminal obeys or cannot show: control characters and halves of surrogate pairs
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Reply:
    """An answer of a model, without surrounding white space.

    Attributes:
        mark: is shown behind an answer that is not complete.
    """

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Answerer:
    """A model, with the chat template of its tokenizer and its decoding settings.

    Attributes:
        temperature: 0 always takes the likeliest token, anything above samples.
        max_new_tokens: the length of the longest answer.
    """

    model: Any  # a model of transformers or, with adapters, of peft
    template: ChatTemplate
    temperature: float
    max_new_tokens: int

    @property
    def stop_tokens(self) -> list[int]:
        """Return the tokens that end an answer."""
        listed = listed_stop_tokens(self.model.generation_config)
        return sorted(listed | self.template.stop_tokens())

    @torch.inference_mode()
    def answer(self, conversations: Sequence[Conversation], batch_size: int) -> list[str]:
        """Return one answer per conversation, without surrounding white space.

        Raises ValueError if a conversation leaves no room for an answer.
        """
        # An answer does not depend on its batch: only rows with as much room share one
        numbers_by_room: dict[int, list[int]] = {}
        for number, conversation in enumerate(conversations):
            _, options = self.prepare([conversation])
            numbers_by_room.setdefault(options["max_new_tokens"], []).append(number)
        answers: dict[int, str] = {}
        for numbers in numbers_by_room.values():
            for start in range(0, len(numbers), batch_size):
                batch = numbers[start : start + batch_size]
                inputs, options = self.prepare([conversations[number] for number in batch])
                output = self.model.generate(**inputs, **options)
                answered = output[:, inputs["input_ids"].shape[1] :]
                for number, tokens in zip(batch, answered, strict=True):
                    answers[number] = self.decode(tokens)
        return [answers[number] for number in range(len(conversations))]

    def decode(self, tokens: torch.Tensor) -> str:
        """Return the text of an answer, without what the template writes around it."""
        text = self.template.tokenizer.decode(tokens, skip_special_tokens=True)
        return answer_in(self.template, text)

    def prepare(self, conversations: Sequence[Conversation]) -> tuple[Any, dict[str, Any]]:
        """Return the tokens of the prompts, [prompts, longest], and the arguments of generate.

        Raises ValueError if a conversation leaves no room for an answer.
        """
        tokenizer = self.template.tokenizer
        prompts = []
        for conversation in conversations:
            conversation = fit_arguments(conversation, self.template)
            prompts.append(self.template.render(conversation, add_generation_prompt=True))
        inputs = self.encode(prompts, conversations).to(self.model.device)
        length = inputs["input_ids"].shape[1]
        longest = most_positions(self.model.config)
        if length >= longest:
            raise ValueError(f"the prompt has {length} tokens; the model is limited to {longest}")
        options = decoding_options(self.model, self.temperature)
        options["eos_token_id"] = self.stop_tokens
        options["pad_token_id"] = tokenizer.pad_token_id
        options["max_new_tokens"] = min(self.max_new_tokens, longest - length)
        return inputs, options

    def encode(self, prompts: Sequence[str], conversations: Sequence[Conversation]) -> Any:
        """Return the tokens of prompts, padded on the left, and the images of their messages.

        The images of a conversation are functions that load one.
        """
        options = {"padding": True, "return_tensors": "pt"}
        if isinstance(self.template, IllustratedTemplate):
            images = []
            for one in conversations:
                number = sum(message["content"].count(IMAGE) for message in one.messages)
                images.append([load()[0] for load in one.images[:number]])
            return self.template.encode(prompts, images, padding_side="left", **options)
        if any(conversation.images for conversation in conversations):
            raise ValueError("this model reads no images, and there are some")
        inputs = self.template.tokenizer(prompts, add_special_tokens=False, **options)
        inputs.pop("token_type_ids", None)
        return inputs

    # ---- While it is shown ----
    def start(
        self,
        conversation: Conversation,
        stopping: Event,
        turn: AbstractContextManager[None] | None = None,
    ) -> tuple[Iterator[str], Future[Reply]]:
        """Start to answer in a thread; return the parts of the answer, and its whole.

        The whole raises one of UNANSWERED if the model cannot answer.

        Args:
            stopping: ends the answer after the current token when it is set.
            turn: what the model is held in while it generates, such as a lock.
        """
        tokenizer: Any = self.template.tokenizer
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        pool = ThreadPoolExecutor(1)
        whole = pool.submit(self._generate, conversation, streamer, stopping, turn or nullcontext())
        whole.add_done_callback(lambda _: streamer.end())
        pool.shutdown(wait=False)
        return streamer, whole

    @torch.inference_mode()
    def _generate(
        self,
        conversation: Conversation,
        streamer: TextIteratorStreamer,
        stopping: Event,
        turn: AbstractContextManager[None],
    ) -> Reply:
        inputs, options = self.prepare([conversation])

        def is_stopped(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), stopping.is_set(), device=input_ids.device)

        criteria: Any = [is_stopped]
        options["stopping_criteria"] = StoppingCriteriaList(criteria)
        with turn:
            output = self.model.generate(**inputs, **options, streamer=streamer)
        tokens = output[0, inputs["input_ids"].shape[1] :]
        mark = ""
        if tokens[-1].item() not in options["eos_token_id"]:
            mark = STOPPED if stopping.is_set() else CUT
        return Reply(self.decode(tokens), mark)


def decoding_options(model: Any, temperature: float) -> dict[str, Any]:
    """Return how tokens are chosen, as arguments of generate; 0 takes the likeliest."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0}
    return greedy_options(model)


# ---- On a terminal ----
def printable(text: str) -> str:
    """Return a text with the characters that a terminal obeys or cannot show as escapes.

    An untrained model writes random bytes, which would move the cursor or change colors.
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_answer(
    answerer: Answerer, conversation: Conversation, turn: AbstractContextManager[None] | None = None
) -> Reply:
    """Print an answer while it is generated, and return it. Ctrl-C stops it.

    Raises one of UNANSWERED if the model cannot answer.
    """
    stopping = Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopping.set())
    try:
        parts, whole = answerer.start(conversation, stopping, turn)
        for part in parts:
            print(printable(part), end="", flush=True)
        reply = whole.result()
    finally:
        signal.signal(signal.SIGINT, before)
    print(reply.mark)
    return reply
