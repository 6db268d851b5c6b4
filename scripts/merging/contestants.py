# SPDX-License-Identifier: Apache-2.0
"""What a model says to prompts, so that it can be compared with what another one says.

A contestant may be any form of a model, for example one in another format that another program
runs. It has the text of each prompt, the tokens that the model answers with, and its logits.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig

from components.chat_template import ChatTemplate
from components.stop_tokens import (
    listed_stop_tokens,
    stop_tokens_of_texts,
    stop_tokens_of_turns,
)
from merging.prompts import Prompt


@dataclass(frozen=True)
class Contestant:
    """What one form of a model says to prompts.

    Attributes:
        name: such as "trained" or "reloaded".
        dtype: of its weights, such as "bfloat16".
        rendered: the text of each prompt, as the contestant's own template renders it.
        prompts: the tokens of each prompt.
        tokens: the likeliest tokens that answer each prompt, with the token that ends the answer.
        logits: for each prompt, those at the last places of the prompt and the reference's answer,
            [places, vocabulary], in fp32. The last of them predict the tokens of the answer. None
            if the program that runs the model has none.
        stop_tokens: those that end an answer; None if unknown.
    """

    name: str
    dtype: str
    rendered: Sequence[str]
    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    logits: Sequence[torch.Tensor] | None
    stop_tokens: frozenset[int] | None


@dataclass(frozen=True)
class Asking:
    """How contestants are asked.

    Attributes:
        settings: variables of the chat template.
    """

    prompts: Sequence[Prompt]
    settings: dict[str, Any]
    max_new_tokens: int
    batch_size: int

    def template_of(self, tokenizer: Any) -> ChatTemplate | None:
        """Return the chat template of a tokenizer, or None if it has none."""
        if not tokenizer.chat_template:
            return None
        return ChatTemplate(tokenizer, self.settings)

    def tokenize(self, tokenizer: Any) -> tuple[list[str], list[list[int]]]:
        """Return the text of each prompt as the template renders it, and its tokens."""
        template = self.template_of(tokenizer)
        rendered = [prompt.render(template) for prompt in self.prompts]
        add_special_tokens = template is None
        return rendered, tokenizer(rendered, add_special_tokens=add_special_tokens)["input_ids"]

    def find_unknown_token(self, model: Any, tokenizer: Any) -> str | None:
        """Return why a model cannot be asked: a tokenizer of another model. None if it can be."""
        _, prompts = self.tokenize(tokenizer)
        largest = max(max(tokens) for tokens in prompts)
        size = model.get_input_embeddings().weight.shape[0]
        if largest < size:
            return None
        return f"the tokenizer makes the token {largest}, but the model knows only {size} tokens"

    def ask(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        answers: Sequence[Sequence[int]] | None = None,
    ) -> Contestant:
        """Return a model of transformers or peft as a contestant.

        Args:
            tokenizer: pads on the left.
            answers: the tokens of the reference; None for the reference itself.
        """
        rendered, prompts = self.tokenize(tokenizer)
        pad = tokenizer.pad_token_id
        tokens: list[list[int]] = []
        logits: list[torch.Tensor] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            decoding = GenerationConfig(
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                eos_token_id=sorted(stop_tokens) or None,
                pad_token_id=pad,
            )
            found = generate(model, batch, decoding, pad)
            tokens += found
            wanted = found
            if answers is not None:
                wanted = [list(answer) for answer in answers[start : start + self.batch_size]]
            logits += predict(model, batch, wanted, pad, self.max_new_tokens)
        dtype = str(model.dtype).removeprefix("torch.")
        return Contestant(name, dtype, rendered, prompts, tokens, logits, stop_tokens)

    def logits_of(self, model: Any, reference: Contestant, pad: int) -> list[torch.Tensor]:
        """Return what another model has as logits where the reference has its own."""
        logits: list[torch.Tensor] = []
        for start in range(0, len(reference.prompts), self.batch_size):
            end = start + self.batch_size
            prompts = reference.prompts[start:end]
            logits += predict(model, prompts, reference.tokens[start:end], pad, self.max_new_tokens)
        return logits


def stop_tokens_of_recipe(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer of a trained model: those of scripts/generate.py."""
    if tokenizer.chat_template:
        trained = stop_tokens_of_turns(tokenizer)
    else:
        trained = stop_tokens_of_texts(tokenizer)
    return stop_tokens_of(model.generation_config) | trained


def stop_tokens_of(config: GenerationConfig) -> frozenset[int]:
    """Return the tokens that a generation config lists as ends of a text."""
    return frozenset(listed_stop_tokens(config))


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and attention mask, [rows, longest], padded on the left."""
    longest = max(len(row) for row in rows)
    tokens = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        tokens[place, longest - len(row) :] = torch.tensor(row)
        mask[place, longest - len(row) :] = 1
    return tokens.to(device), mask.to(device)


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], decoding: GenerationConfig, pad: int
) -> list[list[int]]:
    """Return the tokens of the answer to each prompt, up to the first that ends it."""
    tokens, mask = pad_left(prompts, pad, model.device)
    output = model.generate(input_ids=tokens, attention_mask=mask, generation_config=decoding)
    ends = set(decoding.eos_token_id or [])
    answers = []
    for row in output[:, tokens.shape[1] :].tolist():
        answer = []
        for token in row:
            answer.append(token)
            if token in ends:
                break
        answers.append(answer)
    return answers


def takes_logits_to_keep(model: Any) -> bool:
    """Return whether a model can compute only the last logits."""
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.inference_mode()
def predict(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    pad: int,
    num_places: int,
) -> list[torch.Tensor]:
    """Return the logits at the last places of each prompt and its answer, in fp32.

    Args:
        num_places: the number of places, or fewer where there are not as many. An answer has at
            most as many tokens.

    Returns:
        For each prompt, [places, vocabulary].
    """
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append([*prompt, *answer[:-1]])  # The last token predicts nothing that is compared
    tokens, mask = pad_left(rows, pad, model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    options: dict[str, Any] = {"use_cache": False}
    if takes_logits_to_keep(model):  # Logits at every place of long prompts take much memory
        options["logits_to_keep"] = num_places
    output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, **options)
    logits = []
    for place, row in enumerate(rows):
        kept = min(num_places, len(row))
        logits.append(output.logits[place, -kept:].float().cpu())
    return logits
