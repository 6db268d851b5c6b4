# SPDX-License-Identifier: Apache-2.0
"""A folder as it was trained, and what it says to prompts: other forms of it are compared with it.

merge.py and export.py do so.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig

from common import Exit, stop
from core import workarounds
from core.chat import ChatTemplate, Conversation, fit_arguments
from core.data import FILE_TYPES
from core.generation import listed_stop_tokens, most_positions
from generation.loading import (
    LOAD_ERRORS,
    Source,
    add_adapters,
    arguments_of_run,
    default_device,
    load_tokenizer,
    load_weights,
    refuse_to_load,
)
from generation.rows import columns_of, load_rows, read_rows, to_question

# Largest logit difference, relative to the largest logit, that rounding explains: about 1,000 units
# in the last place in fp32, 6 to 10 in fp16 and bf16, where activations are rounded too
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
UNFINISHED = ".unfinished"  # ending of a folder's name until it is complete and compared
SIXTEEN_BITS = "16bit"  # name of a base that is not quantized
LONGEST = 1024  # tokens of a prompt: longer ones make a comparison slow
MADE = 1000  # at most so many questions are made here
LONGEST_TEXT = 200  # characters of a row of raw text that are a prompt
SIMPLE_QUESTION = "Say something about the number {}."  # for a run whose rows are not here


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
        dtype: of its weights.
        tokens: the likeliest tokens that answer each prompt, with the token that ends the answer.
        logits: for each prompt, those at the last places of the prompt and its answer, [places,
            vocabulary], in fp32. The last of them predict the tokens of the answer.
        stop_tokens: those that end an answer.
    """

    dtype: torch.dtype
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
        config: of the whole model, or of the base of adapters.
        sources: {where prompts come from: how many}.
    """

    source: Source
    arguments: Mapping[str, Any]
    config: Any
    tokenizer: Any
    max_new_tokens: int
    device: str
    prompts: list[Prompt] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str]:
        """Return {role: column} of the run."""
        return columns_of(self.arguments)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return dict(self.arguments.get("chat_template_kwargs") or {})

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
        ends = {self.tokenizer.eos_token_id} - {None}
        if self.tokenizer.chat_template:
            ends = ChatTemplate(self.tokenizer).stop_tokens()
        return sorted(listed_stop_tokens(generation_config) | ends)

    def load_base(self, base_name: str, dtype: Any = None) -> Any:
        """Return the whole model, without adapters. Raises SystemExit with 65 or 69.

        Args:
            base_name: of one that is quantized as in training, or 16bit.
            dtype: of the weights; None for that of the run.
        """
        quantization = None
        if base_name != SIXTEEN_BITS:
            quantization = quantization_of_run(self.arguments)
        wanted = dtype or self.dtype or "auto"
        model = load_weights(self.source, wanted, self.device, quantization)
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
        return Answers(model.dtype, said, logits, ends)

    # ---- Prompts ----
    def find_prompts(self, path: Path | None) -> Iterator[tuple[str, Prompt]]:
        """Yield prompts, each with where it is from: a file, or the run's rows and made questions.

        Raises SystemExit with 65 for a bad row of the named file.
        """
        if path is not None:
            for prompt in load_rows(path, None, self.columns, self.read):
                yield str(path), prompt
            return
        for what, file in files_of_run(self.arguments):
            try:
                for place, row in read_rows(file, self.columns):
                    yield what, self.read(place, row)
            except (OSError, ValueError, DatasetGenerationError):
                continue  # Another file has been put in its place
        for number in range(1, MADE + 1):
            messages = [{"role": "user", "content": SIMPLE_QUESTION.format(number)}]
            yield "simple questions, made here", self.write(Conversation(messages))

    def read(self, place: str, row: Any) -> Prompt:
        """Return a row as a prompt. Raises ValueError with its place."""
        if not self.tokenizer.chat_template:
            text = row.get(self.arguments.get("text_column", "text"))
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{place}: has no text")
            return self.write(text.strip()[:LONGEST_TEXT].rstrip())
        if "chosen" in row and "completion" not in row:
            row = {**row, "completion": row["chosen"]}  # A row of preference tuning
        return self.write(to_question(place, row, None, self.columns).conversation)

    def write(self, asked: Conversation | str) -> Prompt:
        """Return a text or a conversation as a prompt, as the model saw it in training."""
        if not self.tokenizer.chat_template or isinstance(asked, str):
            text = asked if isinstance(asked, str) else asked.messages[0]["content"]
            return Prompt(text, self.tokenizer(text)["input_ids"])
        template = ChatTemplate(self.tokenizer, self.settings)
        text = template.render(fit_arguments(asked, template), add_generation_prompt=True)
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, tokens, asked)


def read_trained(source: Source, args: argparse.Namespace) -> Trained:
    """Return what a folder holds, with its prompts, but without its weights.

    Args:
        args: prompts, num_prompts, max_new_tokens and device of the command line.

    Raises SystemExit with 65 or 69.
    """
    try:
        config = AutoConfig.from_pretrained(
            source.weights, revision=source.revision, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        refuse_to_load(source, error)
    trained = Trained(
        source,
        arguments_of_run(source.name),
        config,
        load_tokenizer(source, needs_template=False),
        args.max_new_tokens,
        args.device or default_device(),
    )
    longest = min(LONGEST, most_positions(config) - args.max_new_tokens)
    for what, prompt in trained.find_prompts(args.prompts):
        if len(trained.prompts) == args.num_prompts:
            break
        if 0 < len(prompt.tokens) <= longest:
            trained.prompts.append(prompt)
            trained.sources[what] = trained.sources.get(what, 0) + 1
    if not trained.prompts:
        stop(Exit.DATA, f"no prompt has at most {longest} tokens; name others by --prompts")
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


# ---- The verdict ----
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


def judge(what: str, folder: Path, reference: Answers, other: Answers, bound: float) -> None:
    """Print how far another form of a model is from the trained one. Raises SystemExit with 76.

    Args:
        what: the other form, as it is named.
        bound: the largest difference of a logit that is no error, relative to the largest logit.
    """
    bound *= reference.largest_logit
    gap = largest_gap(reference, other)
    same = 0
    for ours, theirs in zip(reference.logits, other.logits, strict=True):
        same += torch.equal(ours.argmax(-1), theirs.argmax(-1))
    answers = f"{same} of {len(other.logits)} answers are the same"
    print(f"The largest logit gap of the {what} is {gap:.2e}, its bound {bound:.2e}; {answers}")
    if not gap <= bound:  # also if it is not a number
        differ(folder, f"a logit differs by {gap:.3g}, and the bound is {bound:.3g}")


def differ(folder: Path, what: str) -> NoReturn:
    """End with 76, since what was made is not what was trained."""
    stop(Exit.DIFFERS, f"{what}; what was made is in {folder}")


def new_folder(output: Path) -> Path:
    """Return the place where a folder is written until it is complete and compared.

    Raises SystemExit with 73 if there is something, or at the place of the complete folder.
    """
    unfinished = output.with_name(output.name + UNFINISHED)
    for folder in (output, unfinished):
        if folder.exists() or folder.is_symlink():
            stop(Exit.CANNOT_WRITE, f"{folder} exists; name a new folder, or remove it")
    return unfinished
