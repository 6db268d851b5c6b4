# SPDX-License-Identifier: Apache-2.0
"""Answers of a model to conversations: to many at once, or to one while it is shown."""

import enum
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import StoppingCriteriaList, TextIteratorStreamer

from core.chat import ChatTemplate, Conversation, fit_arguments
from core.generation import answer_in, greedy_options, listed_stop_tokens, most_positions

# What is raised for a prompt that is too long, that the chat template refuses, or for which the
# memory does not suffice
UNANSWERED = (ValueError, TemplateError, torch.OutOfMemoryError)
REPLACEMENT = "\ufffd"  # what bytes that are no character are decoded to
# Control characters, lone surrogates, private use, not assigned
ESCAPED_CATEGORIES = ("Cc", "Cs", "Co", "Cn")


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
    def answer(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return one answer per conversation, without surrounding white space.

        Raises ValueError if a conversation leaves no room for an answer.
        """
        # An answer does not depend on its batch: only rows with as much room share one
        indices_by_room: dict[int, list[int]] = {}
        for index, conversation in enumerate(conversations):
            _, options = self.prepare([conversation])
            indices_by_room.setdefault(options["max_new_tokens"], []).append(index)
        answers: dict[int, str] = {}
        for indices in indices_by_room.values():
            inputs, options = self.prepare([conversations[index] for index in indices])
            length = inputs["input_ids"].shape[1]
            output = self.model.generate(**inputs, **options)
            for index, tokens in zip(indices, output[:, length:], strict=True):
                answers[index] = self.decode(tokens)
        return [answers[index] for index in range(len(conversations))]

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
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        inputs.pop("token_type_ids", None)
        length = inputs["input_ids"].shape[1]
        longest = most_positions(self.model.config)
        if length >= longest:
            raise ValueError(f"the prompt has {length} tokens; the model is limited to {longest}")
        options = decoding_options(self.model, self.temperature)
        options["eos_token_id"] = self.stop_tokens
        options["pad_token_id"] = tokenizer.pad_token_id
        options["max_new_tokens"] = min(self.max_new_tokens, longest - length)
        return inputs, options


def decoding_options(model: Any, temperature: float) -> dict[str, Any]:
    """Return how tokens are chosen, as arguments of generate; 0 takes the likeliest."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0}
    return greedy_options(model)


# ---- Shown while it is generated ----
class Ending(enum.Enum):
    """Why an answer ends, and the mark that is shown after it."""

    COMPLETE = ""  # the model ended its turn
    STOPPED = " [stopped]"  # by the user
    CUT = " [cut off at the limit of tokens]"


@dataclass(frozen=True)
class Reply:
    """An answer of a model, without surrounding white space."""

    text: str
    ending: Ending


class PartStreamer(TextIteratorStreamer):
    """Yields the text of each token at once, but for the half of a character.

    TextStreamer waits for the next space, and many languages have none.
    """

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, [1, tokens], or a token of the answer, [1]."""
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.token_cache.extend(value.tolist())
        text: Any = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
        if text.endswith(REPLACEMENT):
            return
        if len(text) > self.print_len:
            self.on_finalized_text(text[self.print_len :])
        self.print_len = len(text)
        if text.endswith("\n"):  # so that no long text is decoded again for each token
            self.token_cache = []
            self.print_len = 0


class RunningAnswer:
    """An answer that is being generated in a thread of its own: iterate over its parts."""

    def __init__(
        self,
        answerer: Answerer,
        conversation: Conversation,
        turn: AbstractContextManager[None] | None = None,
        stopping: Event | None = None,
    ) -> None:
        """Start to generate.

        Args:
            turn: what the model has to be held in while it generates, such as a lock.
            stopping: ends the answer when it is set.
        """
        self._answerer = answerer
        self._conversation = conversation
        self._turn = turn or nullcontext()
        self._stopping = stopping or Event()
        tokenizer: Any = answerer.template.tokenizer
        self._streamer = PartStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._reply = Reply("", Ending.STOPPED)
        self._error: Exception | None = None
        # A daemon, so that a process that was told to end twice does not wait for a long prompt
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the parts; after an exception another one yields the others."""
        return self._streamer

    def stop(self) -> None:
        """End the answer after the current token. The parts until then are still to be read."""
        self._stopping.set()

    def result(self) -> Reply:
        """Wait for the end of the answer and return it.

        Raises one of UNANSWERED if the model cannot answer.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reply

    def _run(self) -> None:
        try:
            with self._turn:
                if not self._stopping.is_set():
                    self._reply = self._generate()
        except Exception as error:  # raised again where the answer is read
            self._error = error
        finally:
            self._streamer.end()

    def _is_stopped(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return for each row, [rows], whether it is to end: a StoppingCriteria."""
        return torch.full((len(input_ids),), self._stopping.is_set(), device=input_ids.device)

    @torch.inference_mode()
    def _generate(self) -> Reply:
        inputs, options = self._answerer.prepare([self._conversation])
        criteria: Any = [self._is_stopped]
        output = self._answerer.model.generate(
            **inputs,
            **options,
            streamer=self._streamer,
            stopping_criteria=StoppingCriteriaList(criteria),
        )
        tokens = output[0, inputs["input_ids"].shape[1] :]
        text = self._answerer.decode(tokens)
        if tokens[-1].item() in options["eos_token_id"]:
            return Reply(text, Ending.COMPLETE)
        text = text.rstrip(REPLACEMENT)  # a token may be the half of a character
        if self._stopping.is_set():
            return Reply(text, Ending.STOPPED)
        return Reply(text, Ending.CUT)


# ---- On a terminal ----
def printable(text: str) -> str:
    """Return a text with the characters that a terminal obeys or cannot show as escapes.

    An untrained model writes random bytes. They would move the cursor or change colors, and tools
    such as grep would take the output for a binary file.
    """
    return "".join(map(printable_character, text))


def printable_character(character: str) -> str:
    """Return a character as it is, or its escape, such as `\\x1b`."""
    if character in "\n\t" or unicodedata.category(character) not in ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()


def print_parts(running: RunningAnswer) -> None:
    """Print the parts of an answer that were not printed yet, as they are generated."""
    for part in running:
        print(printable(part), end="", flush=True)
