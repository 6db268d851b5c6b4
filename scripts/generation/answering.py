# SPDX-License-Identifier: Apache-2.0
"""Answers of a model to conversations."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import BatchEncoding, TextStreamer

from core.chat import ChatTemplate, Conversation, fit_arguments
from core.generation import answer_in, greedy_options, listed_stop_tokens, most_positions


@dataclass(frozen=True)
class Answerer:
    """A model, with the chat template of its tokenizer and its decoding settings."""

    model: Any  # a model of transformers or, with adapters, of peft
    template: ChatTemplate
    decoding: dict[str, Any]  # arguments of transformers' generate
    max_new_tokens: int  # the length of the longest answer

    @torch.inference_mode()
    def answer(
        self, conversations: list[Conversation], streamer: TextStreamer | None = None
    ) -> list[str]:
        """Return one answer per conversation, without surrounding white space.

        streamer: prints the answer to a single conversation as it is generated.
        Raises ValueError if a conversation leaves no room for an answer.
        """
        # An answer does not depend on its batch: only rows with as much room share one
        indices_by_room: dict[int, list[int]] = {}
        for index, conversation in enumerate(conversations):
            _, decoding = self.prepare([conversation])
            indices_by_room.setdefault(decoding["max_new_tokens"], []).append(index)
        answers: dict[int, str] = {}
        for indices in indices_by_room.values():
            inputs, decoding = self.prepare([conversations[index] for index in indices])
            length = inputs["input_ids"].shape[1]
            output = self.model.generate(**inputs, **decoding, streamer=streamer)
            for index, tokens in zip(indices, output[:, length:], strict=True):
                text = self.template.tokenizer.decode(tokens, skip_special_tokens=True)
                answers[index] = answer_in(self.template, text)
        return [answers[index] for index in range(len(conversations))]

    def prepare(self, conversations: list[Conversation]) -> tuple[BatchEncoding, dict[str, Any]]:
        """Return the tokens of the prompts, [prompts, longest], and how to generate after them.

        Raises ValueError if a conversation leaves no room for an answer.
        """
        prompts = []
        for conversation in conversations:
            conversation = fit_arguments(conversation, self.template)
            prompts.append(self.template.render(conversation, add_generation_prompt=True))
        inputs = self.template.tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt"
        ).to(self.model.device)
        inputs.pop("token_type_ids", None)
        length = inputs["input_ids"].shape[1]
        longest = most_positions(self.model.config)
        if length >= longest:
            raise ValueError(f"the prompt has {length} tokens; the model is limited to {longest}")
        room = min(self.max_new_tokens, longest - length)
        return inputs, self.decoding | {"max_new_tokens": room}

    def with_decoding(self, temperature: float, max_new_tokens: int) -> "Answerer":
        """Return the same model with other decoding settings; temperature as in `make_decoding`."""
        decoding = make_decoding(self.model, self.template.tokenizer, temperature)
        return replace(self, decoding=decoding, max_new_tokens=max_new_tokens)


def make_decoding(model: Any, tokenizer: Any, temperature: float) -> dict[str, Any]:
    """Return how tokens are chosen until the assistant's turn ends: arguments of generate.

    temperature: 0 always takes the likeliest token, anything above samples.
    """
    ends = listed_stop_tokens(model.generation_config) | ChatTemplate(tokenizer).stop_tokens()
    options = greedy_options(model)
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0}
    return options | {"eos_token_id": sorted(ends), "pad_token_id": tokenizer.pad_token_id}
