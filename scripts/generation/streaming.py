# SPDX-License-Identifier: Apache-2.0
"""Answers that are shown while they are generated, and that can be stopped."""

import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from core.chat import Conversation
from core.generation import answer_in
from generation.answering import Answerer

# What is raised for a prompt that is too long, that the chat template refuses, or for which the
# memory does not suffice
UNANSWERED = (ValueError, TemplateError, torch.OutOfMemoryError)
REPLACEMENT = "\ufffd"  # what bytes that are no character are decoded to


class Ending(enum.Enum):
    """Why an answer ends."""

    COMPLETE = "complete"  # the model ended its turn
    STOPPED = "stopped"  # the user stopped it
    CUT = "cut"  # it has as many tokens as were allowed


def mark_of(ending: Ending) -> str:
    """Return what is shown after an answer."""
    match ending:
        case Ending.COMPLETE:
            return ""
        case Ending.STOPPED:
            return " [stopped]"
        case Ending.CUT:
            return " [cut off at the limit of tokens]"


@dataclass(frozen=True)
class Reply:
    """An answer of a model, without surrounding white space."""

    text: str
    ending: Ending


class StopOnEvent(StoppingCriteria):
    """Ends an answer after the token during which an event was set."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        """Return for each row, [rows], whether it is to end."""
        ends = torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)
        return ends.bool()  # pyrefly: ignore[bad-return]  # it is annotated as a Tensor


class PartStreamer(TextIteratorStreamer):
    """Yields the text of each token at once, but for the half of a character.

    TextStreamer waits for the next space, and many languages have none.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, [1, tokens], or a token of the answer, [1]."""
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.token_cache.extend(value.tolist())
        text: Any = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
        if text.endswith(REPLACEMENT):
            return
        part = text[self.print_len :]
        self.print_len = len(text)
        if text.endswith("\n"):  # so that no long text is decoded again for each token
            self.token_cache = []
            self.print_len = 0
        if part:
            self.on_finalized_text(part)


class RunningAnswer:
    """An answer that is being generated in a thread of its own: iterate over its parts."""

    def __init__(
        self,
        answerer: Answerer,
        conversation: Conversation,
        turn: AbstractContextManager[None],
        stopping: Event,
    ) -> None:
        """Start to generate.

        Args:
            turn: what the model has to be held in while it generates, such as a lock.
            stopping: ends the answer when it is set.
        """
        self._answerer = answerer
        self._conversation = conversation
        self._turn = turn
        self._stopping = stopping
        self._streamer = PartStreamer(answerer.template.tokenizer)
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

    @torch.inference_mode()
    def _generate(self) -> Reply:
        answerer = self._answerer
        inputs, decoding = answerer.prepare([self._conversation])
        output = answerer.model.generate(
            **inputs,
            **decoding,
            streamer=self._streamer,
            stopping_criteria=StoppingCriteriaList([StopOnEvent(self._stopping)]),
        )
        tokens = output[0, inputs["input_ids"].shape[1] :]
        text = answerer.template.tokenizer.decode(tokens, skip_special_tokens=True)
        text = answer_in(answerer.template, text)
        if tokens[-1].item() in decoding["eos_token_id"]:
            return Reply(text, Ending.COMPLETE)
        text = text.rstrip(REPLACEMENT)  # a token may be the half of a character
        if self._stopping.is_set():
            return Reply(text, Ending.STOPPED)
        return Reply(text, Ending.CUT)
