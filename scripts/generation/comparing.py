# SPDX-License-Identifier: Apache-2.0
"""A folder as it was trained, and its logits of prompts: other forms of it are compared with it.

merge.py and export.py do so.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from transformers import AutoConfig

from common import Exit, stop
from core import workarounds
from core.chat import Conversation, fit_arguments
from core.generation import listed_stop_tokens, most_positions
from core.model import quantization
from generation.loading import (
    Source,
    add_adapters,
    auto_class_of,
    default_device,
    load_tokenizer,
    load_weights,
    loading,
)
from generation.rows import load_questions

# Largest logit difference, relative to the largest logit, that rounding explains: about 1,000 units
# in the last place in fp32, 6 to 10 in fp16 and bf16, where activations are rounded too
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
UNFINISHED = ".unfinished"  # ending of a folder's name until it is complete and compared
SIXTEEN_BITS = "16bit"  # name of a base that is not quantized
LONGEST = 1024  # tokens of a prompt: longer ones make a comparison slow
PLACES = 16  # at the end of a prompt, whose logits are compared
SIMPLE_QUESTION = "Say something about the number {}."  # for a run whose rows are not here


@dataclass
class Trained:
    """A trained folder, whole or of adapters, and the prompts that it is asked.

    Attributes:
        arguments: those of its run; {} without a record of it.
        config: of the whole model, or of the base of adapters.
        conversations, prompts: what it is asked, and the texts that its template made of them.
    """

    source: Source
    arguments: Mapping[str, Any]
    config: Any
    tokenizer: Any
    device: str
    conversations: list[Conversation] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

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
            ends = self.source.template().stop_tokens()
        return sorted(listed_stop_tokens(generation_config) | ends)

    def load_base(self, base_name: str, dtype: Any = None) -> Any:
        """Return the whole model, without adapters. Raises SystemExit with 65 or 69.

        Args:
            base_name: of one that is quantized as in training, or 16bit.
            dtype: of the weights; None for that of the run.
        """
        in_bits = None
        if base_name != SIXTEEN_BITS:
            given = SimpleNamespace(**self.arguments)
            in_bits = quantization(given, Accelerator(), auto_class_of(self.source))
        wanted = dtype or self.arguments.get("dtype", "auto")
        model = load_weights(self.source, wanted, self.device, in_bits)
        workarounds.keep_4bit_weights_as_loaded(model)
        return model.eval()

    def load(self) -> Any:
        """Return the model as it was trained. Raises SystemExit with 65 or 69."""
        if self.source.base is None:
            return self.load_base(SIXTEEN_BITS, "auto")
        return add_adapters(self.load_base(self.base_name), self.source).eval()

    @torch.inference_mode()
    def ask(self, model: Any) -> list[torch.Tensor]:
        """Return a form's logits at the last places of each prompt, [places, vocabulary], in fp32.

        Each prompt is one batch, since some models read padding.
        """
        found = []
        for prompt in self.prompts:
            tokens = torch.tensor([tokens_of(prompt, self.tokenizer)], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits
            found.append(logits[0, -PLACES:].float().cpu())
        return found


def read_trained(source: Source, args: argparse.Namespace) -> Trained:
    """Return what a folder holds, with its prompts, but without its weights.

    Args:
        args: prompts, num_prompts and device of the command line.

    Raises SystemExit with 65 or 69.
    """
    with loading(source.weights):
        config = AutoConfig.from_pretrained(
            source.weights, revision=source.revision, trust_remote_code=False
        )
    tokenizer = load_tokenizer(source, needs_template=False)
    device = args.device or default_device()
    trained = Trained(source, source.arguments, config, tokenizer, device)
    longest = min(LONGEST, most_positions(config))
    for conversation in find_conversations(trained, args):
        text = conversation.messages[0]["content"]
        if tokenizer.chat_template:
            template = source.template()
            text = template.render(fit_arguments(conversation, template), True)
        if len(tokens_of(text, tokenizer)) <= longest:
            trained.conversations.append(conversation)
            trained.prompts.append(text)
    if not trained.prompts:
        stop(Exit.DATA, f"no prompt has at most {longest} tokens; name others by --prompts")
    return trained


def find_conversations(trained: Trained, args: argparse.Namespace) -> list[Conversation]:
    """Return what the prompts are made of: rows of a file, or simple questions, made here.

    The file is that of --prompts, or else that of the run's evaluation if it has conversations.
    """
    path = args.prompts
    if path is None:
        path = Path(trained.arguments.get("eval_dataset_name") or "none")
        has_texts = "text_column" in trained.arguments or not trained.tokenizer.chat_template
        # One text without images is asked of all forms of a model that reads some
        if has_texts or trained.source.reads_images or not path.is_file():
            numbers = range(1, args.num_prompts + 1)
            texts = [SIMPLE_QUESTION.format(number) for number in numbers]
            return [Conversation([{"role": "user", "content": text}]) for text in texts]
    print(f"The prompts are rows of {path}")
    questions = load_questions(path, trained.arguments, args.num_prompts)
    return [question.conversation for question in questions]


def tokens_of(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt. The text of a template has all special tokens."""
    return tokenizer(prompt, add_special_tokens=not tokenizer.chat_template)["input_ids"]


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts the token of the beginning before each text."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


# ---- The verdict ----
def largest_gap(reference: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a logit, not a number if one of them is none."""
    return (torch.cat([*reference]) - torch.cat([*others])).abs().max().item()


def judge(
    what: str,
    folder: Path,
    reference: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    bound: float,
) -> None:
    """Print how far another form of a model is from the trained one. Raises SystemExit with 76.

    Args:
        what: the other form, as it is named.
        reference, others: the logits of the two forms.
        bound: the largest difference of a logit that is no error, relative to the largest logit.
    """
    bound *= max(logits.abs().max().item() for logits in reference)
    gap = largest_gap(reference, others)
    pairs = zip(reference, others, strict=True)
    same = sum(torch.equal(ours.argmax(-1), theirs.argmax(-1)) for ours, theirs in pairs)
    alike = f"{same} of {len(others)} prompts have the same likeliest tokens"
    print(f"The largest logit gap of the {what} is {gap:.2e}, its bound {bound:.2e}; {alike}")
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
        if folder.exists():
            stop(Exit.CANNOT_WRITE, f"{folder} exists; name a new folder, or remove it")
    return unfinished
