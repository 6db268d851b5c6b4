# SPDX-License-Identifier: Apache-2.0
"""A trained folder as it was trained, and what it says to prompts.

merge.py and export.py compare other forms of a model with it.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from core import workarounds
from core.chat import ChatTemplate, Conversation, fit_arguments
from core.data import FILE_TYPES
from core.generation import listed_stop_tokens, stop_tokens_of_texts
from exits import Exit, first_line, stop
from generation.loading import (
    LOAD_ERRORS,
    Source,
    add_adapters,
    arguments_of_run,
    default_device,
    load_tokenizer,
    refuse_to_load,
)
from generation.rows import columns_of_run, read_rows, to_question

# Largest logit difference, relative to the largest logit, that rounding explains: about 1,000 units
# in the last place in fp32, 6 to 10 in fp16 and bf16, where activations are rounded too
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
SIXTEEN_BITS = "16bit"  # name of a base that is not quantized
LONGEST = 1024  # tokens of a prompt: longer ones make a comparison slow
LONGEST_TEXT = 200  # characters of a row of raw text that are a prompt
SUBJECTS = ("a lamp", "the moon", "bread", "a river", "music", "winter", "a bridge", "tea", "ice")
REQUESTS = (
    "Describe {} in one sentence.",
    "Write a short poem about {}.",
    "Why do people like {}?",
    "Name three words that go with {}.",
    "Translate into French: {}.",
    "Is {} older than a car?",
)


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the options of usage.add_prompt_options, and with --bound."""
    if args.bound is not None and not 0 < args.bound < math.inf:
        yield "--bound must be above 0"


@dataclass(frozen=True)
class Prompt:
    """A text that is to be continued, and the conversation that a template wrote as this text."""

    text: str
    tokens: Sequence[int]
    conversation: Conversation | None = None


@dataclass(frozen=True)
class Answers:
    """What one form of a model says to prompts.

    Attributes:
        dtype: of its weights, such as "bfloat16".
        prompts: the tokens of each prompt.
        tokens: the likeliest tokens that answer each prompt, with the token that ends the answer.
        logits: for each prompt, those at the last places of the prompt and its answer, [places,
            vocabulary], in fp32. The last of them predict the tokens of the answer.
        stop_tokens: those that end an answer.
    """

    dtype: str
    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    logits: Sequence[torch.Tensor]
    stop_tokens: Sequence[int]

    @property
    def largest_logit(self) -> float:
        """Return the largest absolute logit; not a number if one of them is none."""
        return torch.stack([logits.abs().max() for logits in self.logits]).max().item()


@dataclass
class Trained:
    """A trained folder, whole or of adapters, and the prompts that it is asked.

    Attributes:
        arguments: those of its run; {} without a record of it.
        settings: variables of the chat template.
        longest: the most tokens of a prompt.
        config: of the whole model, or of the base of adapters.
        sources: {where prompts come from: how many}.
    """

    source: Source
    arguments: Mapping[str, Any]
    config: Any
    tokenizer: Any
    settings: dict[str, Any]
    max_new_tokens: int
    device: str
    longest: int = LONGEST
    prompts: list[Prompt] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype into which the run loaded the base; None for that of its files."""
        return getattr(torch, str(self.arguments.get("dtype", "auto")), None)

    @property
    def base_name(self) -> str:
        """Return the name of the base that adapters were trained on: 16bit, 8bit or 4bit."""
        for bits in ("4bit", "8bit"):
            if self.arguments.get(f"load_in_{bits}"):
                return bits
        return SIXTEEN_BITS

    def stop_tokens(self, generation_config: Any) -> list[int]:
        """Return the tokens that end an answer: those of scripts/generate.py."""
        ends = stop_tokens_of_texts(self.tokenizer)
        if self.tokenizer.chat_template:
            ends = ChatTemplate(self.tokenizer).stop_tokens()
        return sorted(listed_stop_tokens(generation_config) | ends)

    def load_base(self, base_name: str, dtype: str | None = None) -> Any:
        """Return the whole model, without adapters. Raises SystemExit with 65 or 69.

        Args:
            base_name: of one that is quantized as in training, or 16bit.
            dtype: of the weights; None for that of the run.
        """
        options: dict[str, Any] = {}
        if base_name != SIXTEEN_BITS:
            options["quantization_config"] = quantization_of_run(self.arguments)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.source.weights,
                dtype=dtype or self.dtype or "auto",
                device_map=self.device,
                revision=self.source.revision,
                trust_remote_code=False,
                **options,
            )
        except LOAD_ERRORS as error:
            refuse_to_load(self.source, error)
        workarounds.keep_4bit_weights_as_loaded(model)
        return model.eval()

    def load(self) -> Any:
        """Return the model as it was trained. Raises SystemExit with 65 or 69."""
        if self.source.base is None:
            return self.load_base(SIXTEEN_BITS, "auto")
        return add_adapters(self.load_base(self.base_name), self.source).eval()

    @torch.inference_mode()
    def ask(self, model: Any, answers: Sequence[Sequence[int]] | None = None) -> Answers:
        """Return what a model says. Each prompt is one batch, since some models read padding.

        Args:
            answers: those of the trained model, to which the logits belong; None for that itself.
        """
        ends = self.stop_tokens(model.generation_config)
        decoding = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        said = []
        logits = []
        for place, prompt in enumerate(self.prompts):
            tokens = torch.tensor([list(prompt.tokens)], device=model.device)
            if answers is None:
                mask = torch.ones_like(tokens)
                output = model.generate(
                    input_ids=tokens, attention_mask=mask, generation_config=decoding
                )
                said.append(output[0, tokens.shape[1] :].tolist())
            else:
                said.append(answers[place])
            # The last token of an answer predicts nothing that is compared
            text = [*prompt.tokens, *said[-1][:-1]]
            places = model(input_ids=torch.tensor([text], device=model.device), use_cache=False)
            logits.append(places.logits[0, -self.max_new_tokens :].float().cpu())
        dtype = str(model.dtype).removeprefix("torch.")
        prompts = [prompt.tokens for prompt in self.prompts]
        return Answers(dtype, prompts, said, logits, ends)

    def collect(self, path: Path | None, number: int, takes: Callable[[Prompt], bool]) -> None:
        """Collect prompts: of a file, or of the rows of the run, and then of simple questions.

        Args:
            path: the file that the user named, if any. Then no other rows are read.
            number: the most prompts.
            takes: whether a prompt is one of them.

        Raises SystemExit with 65 for a bad row of the named file, and if there is no prompt.
        """
        for source, prompt in itertools.chain(self._read_files(path), self._make_questions()):
            if len(self.prompts) == number:
                return
            if 0 < len(prompt.tokens) <= self.longest and takes(prompt):
                self.prompts.append(prompt)
                self.sources[source] = self.sources.get(source, 0) + 1
        if not self.prompts:
            stop(Exit.DATA, f"no prompt has at most {self.longest} tokens; name --prompts")

    def _read_files(self, path: Path | None) -> Iterator[tuple[str, Prompt]]:
        """Yield the rows of files as prompts, each with the source that it is from."""
        columns = columns_of_run(self.source.name)
        files = files_of_run(self.arguments) if path is None else [(str(path), path)]
        for what, file in files:
            try:
                for place, row in read_rows(file, columns):
                    with nullcontext() if path is not None else suppress(ValueError):
                        yield what, self._read(place, row, columns)
            except (OSError, ValueError, DatasetGenerationError) as error:
                if path is not None:
                    reason = first_line(error.__cause__ or error)
                    stop(Exit.DATA, reason if str(path) in reason else f"{path}: {reason}")
        if path is not None and not self.prompts:
            stop(Exit.DATA, f"{path}: no row that can be asked in {self.longest} tokens")

    def _make_questions(self) -> Iterator[tuple[str, Prompt]]:
        for request, subject in itertools.product(REQUESTS, SUBJECTS):
            messages = [{"role": "user", "content": request.format(subject)}]
            yield "simple questions, made here", self._write(Conversation(messages))

    def _read(self, place: str, row: Any, columns: Mapping[str, str]) -> Prompt:
        """Return a row as a prompt. Raises ValueError with its place."""
        if not self.tokenizer.chat_template:
            text = row.get(columns.get("text", "text")) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{place}: has no text")
            text = text.strip()[:LONGEST_TEXT].rstrip()
            return Prompt(text, self.tokenizer(text)["input_ids"])
        if isinstance(row, dict) and "chosen" in row and "completion" not in row:
            row = {**row, "completion": row["chosen"]}  # A row of preference tuning
        return self._write(to_question(place, row, None, columns).conversation)

    def _write(self, conversation: Conversation) -> Prompt:
        """Return a conversation as a prompt, as the model saw it in training."""
        if not self.tokenizer.chat_template:
            text = conversation.messages[0]["content"]
            return Prompt(text, self.tokenizer(text)["input_ids"])
        template = ChatTemplate(self.tokenizer, self.settings)
        text = template.render(fit_arguments(conversation, template), add_generation_prompt=True)
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, tokens, conversation)


def read_trained(
    source: Source, args: argparse.Namespace, takes: Callable[[Prompt], bool] = lambda _: True
) -> Trained:
    """Return what a folder holds, with its prompts, but without its weights.

    Args:
        args: prompts, num_prompts, max_new_tokens and device of the command line.
        takes: whether a prompt is one of them.

    Raises SystemExit with 64, 65 or 69.
    """
    arguments = arguments_of_run(source.name)
    try:
        config = AutoConfig.from_pretrained(
            source.weights, revision=source.revision, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        refuse_to_load(source, error)
    trained = Trained(
        source,
        arguments,
        config,
        load_tokenizer(source, needs_template=False),
        dict(arguments.get("chat_template_kwargs") or {}),
        args.max_new_tokens,
        args.device or default_device(),
    )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        trained.longest = min(LONGEST, positions - args.max_new_tokens)
    if trained.longest < 1:
        stop(Exit.USAGE, f"--max_new_tokens {args.max_new_tokens}: the model has {positions}")
    trained.collect(args.prompts, args.num_prompts, takes)
    return trained


def quantization_of_run(arguments: Mapping[str, Any]) -> BitsAndBytesConfig:
    """Return the configuration with which a run on a quantized base loaded that."""
    if arguments.get("load_in_8bit"):
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = str(arguments.get("dtype", "auto")).replace("auto", "bfloat16")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=arguments.get("bnb_4bit_quant_type", "nf4"),
        bnb_4bit_quant_storage=dtype,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=bool(arguments.get("bnb_4bit_use_double_quant", False)),
    )


def files_of_run(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield (what rows they are, path) of the files of rows that a run read and that are here."""
    for what, key in (
        ("evaluation rows of the run", "eval_dataset_name"),
        ("training rows of the run, not held out", "dataset_name"),
    ):
        given = arguments.get(key) or []
        for path in map(Path, [given] if isinstance(given, str) else given):
            if path.suffix in FILE_TYPES and path.is_file():
                yield what, path


def largest_gap(one: Answers, another: Answers) -> float:
    """Return the largest difference of a logit; infinity for another vocabulary.

    A logit that is not a number makes the gap one too.
    """
    gaps = [torch.zeros(())]
    for ours, theirs in zip(one.logits, another.logits, strict=True):
        if ours.shape != theirs.shape:
            return math.inf
        gaps.append((ours - theirs).abs().max())
    return torch.stack(gaps).max().item()


def count_same(one: Answers, another: Answers) -> int:
    """Return for how many prompts the likeliest tokens are the same at every place."""
    same = 0
    for ours, theirs in zip(one.logits, another.logits, strict=True):
        same += torch.equal(ours.argmax(-1), theirs.argmax(-1))
    return same
