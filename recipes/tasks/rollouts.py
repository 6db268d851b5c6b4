# SPDX-License-Identifier: Apache-2.0
"""Answers that a model samples while it is trained by their rewards."""

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.distributed.fsdp import FSDPModule
from transformers import LogitsProcessor, LogitsProcessorList

from core.batches import Plan, starts_of_batches
from core.chat import ChatTemplate, Conversation, as_messages, find_tools, read_message
from core.data import Row, Rows, hash_of_row
from core.engine import Layout
from core.exits import Exit, fail
from core.extras import first_of
from core.generation import generate, greedy_options, listed_stop_tokens
from core.loss import LossInHead
from core.metrics import peak_memory_gib
from core.workarounds import fsdp_plugin

EVALUATION = 0  # where rollouts, which begin at 1, have their number in a seed


# ---- Rows and the answers to them ----
def tokenize_prompt(
    row: Row, prompt: Any, template: ChatTemplate, max_length: int
) -> dict[str, Any]:
    """Return the tokens of a prompt, up to where its answer begins, and what rewards depend on.

    Args:
        row: whose columns reward functions get.
        prompt: a list of messages, or a text, which then is the user's.
        max_length: the most tokens of a prompt, of which none is cut.

    Raises:
        ValueError: if there are no messages, or too many tokens.
    """
    messages = enumerate(as_messages(prompt, "user"), start=1)
    asked = Conversation([read_message(said, number)[0] for number, said in messages])
    asked = replace(asked, tools=find_tools(row))
    text = template.render(asked, add_generation_prompt=True)
    ids = template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) > max_length:
        raise ValueError(f"has a prompt of {len(ids)} tokens: --max_prompt_length is {max_length}")
    columns = json.dumps({**row, "prompts": prompt}, default=str)
    return {
        "input_ids": ids,
        "columns": columns,
        "length": len(ids),
        "largest": max(ids),
        "hash": hash_of_row(np.array(ids).tobytes() + columns.encode()),
    }


@dataclass
class Answer:
    """An answer that the model has sampled.

    Attributes:
        number: number n is answer n % --num_generations to row n // --num_generations.
        row: the prepared row.
        ids: its tokens, the one that ends it included.
        is_truncated: whether --max_completion_length has cut it off.
        rewards: by each function, NaN where it does not judge the answer.
        advantage: by how much it is better than the others to the same prompt.
    """

    number: int
    row: Mapping[str, Any]
    ids: list[int]
    is_truncated: bool
    text: str
    rewards: list[float] = field(default_factory=list)
    advantage: float = 0.0

    def arguments(self) -> dict[str, Any]:
        """Return what a reward function gets of it: the row's columns, and TRL's arguments.

        Where the prompt is a list of messages, so is the completion.
        """
        columns = json.loads(self.row["columns"])
        completion: Any = self.text
        if isinstance(columns["prompts"], list):
            completion = [{"role": "assistant", "content": self.text}]
        return columns | {"completions": completion, "completion_ids": self.ids}


class AnswerPlan(Plan):
    """Which answers each optimizer step trains on, whose number is that of --num_generations a row.

    The lines of the plan are answers. All answers to a row are in the same step, and as many steps
    as --num_iterations train on the same answers, which are one rollout.
    """

    def check(self) -> None:
        """End with 64 if a step would have some of the answers to a row, or under FSDP1.

        Its NO_SHARD was seen to have other gradients after answers were sampled.
        """
        args = self.args
        strategy = self.layout.strategy
        if strategy.startswith("FSDP1"):
            fail(Exit.USAGE, f"{strategy}: answers are not sampled under FSDP1: use FSDP2's YAML")
        if self.rows_per_step % args.num_generations:
            fail(
                Exit.USAGE,
                f"--num_generations {args.num_generations}: does not divide the "
                f"{self.rows_per_step} answers of a step (--per_device_train_batch_size x "
                "--gradient_accumulation_steps x ranks), which would split those to one prompt",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the rows."""
        return super().steps_per_epoch * self.args.num_iterations

    def rollout_of(self, step: int) -> int:
        """Return the number of the rollout that a step trains on, both counted from 1."""
        return (step - 1) // self.args.num_iterations + 1

    def micro_batches(self, rollout: int) -> list[list[int]]:
        """Return the numbers of the answers in each of this rank's micro-batches of a rollout.

        In the last rollout of an epoch some may have fewer answers, or none.
        """
        epoch, place = divmod(rollout - 1, super().steps_per_epoch)
        window = self.order_of(epoch)[place * self.rows_per_step :][: self.rows_per_step]
        size = self.args.per_device_train_batch_size
        starts = starts_of_batches(self.rows_per_step, size, self.layout)
        return [window[start : start + size].tolist() for start in starts]

    def order_of(self, epoch: int) -> np.ndarray:
        """Return the numbers of all answers, those to a row together, in the order of an epoch."""
        generations = self.args.num_generations
        rows = Plan(self.args, self.layout, self.num_lines // generations, self.lengths)
        return (rows.order_of(epoch)[:, None] * generations + np.arange(generations)).ravel()


# ---- Sampling ----
class RowNoise(LogitsProcessor):
    """Makes the likeliest token a sample from softmax(logits / temperature), for each row apart.

    The largest of logits / temperature + Gumbel noise is such a sample. Each row draws its own
    noise, so that its answer depends neither on its batch nor on its rank.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores with noise, [rows, vocabulary]."""
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)  # whose negative logarithm is Gumbel noise
        return scores / self._temperature - noise.log()


class Sampler:
    """What samples answers, each from a seed of its own."""

    def __init__(
        self,
        args: Any,
        run: Any,
        layout: Layout,
        tokenizer: Any,
        model: Any,
        token_loss: LossInHead,
    ) -> None:
        """Read from the model, before `prepare`, which tokens end an answer.

        Args:
            token_loss: has the model's head return logits.
        """
        self._args = args
        self._layout = layout
        self._tokenizer = tokenizer
        self._token_loss = token_loss
        listed = listed_stop_tokens(model.generation_config)
        self._ends = ChatTemplate(tokenizer).stop_tokens() | listed
        self.peak_memory_gib = 0.0  # most since the last logged step
        # Whatever the base's generation config says, nothing but the temperature changes what is
        # sampled, since the loss knows of nothing else
        self._options = greedy_options(model) | {
            "eos_token_id": sorted(self._ends),
            "pad_token_id": tokenizer.pad_token_id,
            "max_new_tokens": args.max_completion_length,
            "use_cache": True,
        }
        # An extra may answer instead
        parts = (args, run, layout.accelerator, tokenizer, self._options)
        self._answerer = first_of(args.EXTRAS, "answerer", *parts)

    def sample(
        self, model: torch.nn.Module, rows: Rows, numbers: Sequence[int], size: int, rollout: int
    ) -> list[Answer]:
        """Return the answers of these numbers, in their order.

        Every rank takes part with at most `size` numbers.

        Args:
            model: as `prepare` returned it.
            rows: the prompts.
            size: the same on all ranks; --generation_batch of them are answered at a time.
            rollout: with --seed and the number of an answer, it is what its seed depends on.
        """
        args = self._args
        asked = [rows.dataset[number // args.num_generations] for number in numbers]
        seeds = []
        for number in numbers:
            drawn = np.random.SeedSequence((args.seed, rollout, number))
            seeds.append(int(drawn.generate_state(1, np.uint64)[0]))
        self._token_loss.return_logits()
        if self._answerer is None:
            written = self._generate(model, asked, seeds, size)
        else:
            written = self._answerer.answer(model, asked, seeds)
        self.peak_memory_gib = peak_memory_gib(starts_anew=False)
        answers = []
        for number, row, (ids, is_truncated) in zip(numbers, asked, written, strict=True):
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            answers.append(Answer(number, row, ids, is_truncated, text))
        return answers

    @torch.no_grad()
    def _generate(
        self, model: torch.nn.Module, rows: Sequence[Row], seeds: Sequence[int], size: int
    ) -> list[tuple[list[int], bool]]:
        """Return the tokens of an answer to each row, and whether it was cut off.

        In training mode a model that recomputes activations would sample wrong tokens without a
        word: it drops the cache that `generate` relies on. A rank without rows takes part with one
        token.
        """
        args = self._args
        accelerator = self._layout.accelerator
        at_a_time = args.generation_batch or size
        model.eval()
        if accelerator.is_fsdp2:
            # peft's generate runs the model inside of the first one, which has to run before it
            token = torch.zeros(1, 1, dtype=torch.long, device=self._layout.device)
            model(input_ids=token, use_cache=False)
        written: list[tuple[list[int], bool]] = []
        with gathered(model, accelerator, args.gather_for_generation):
            for start in range(0, size, at_a_time):
                part = slice(start, start + at_a_time)
                prompts = [row["input_ids"].tolist() for row in rows[part]]
                padded = self._tokenizer.pad(
                    {"input_ids": prompts or [[self._tokenizer.pad_token_id]]},
                    padding_side="left",
                    return_tensors="pt",
                    verbose=False,
                )
                inputs = send_to_device(dict(padded), self._layout.device)
                noise = RowNoise(seeds[part] or [0], args.temperature, self._layout.device)
                noises = LogitsProcessorList([noise])
                options = {**self._options, "logits_processor": noises}
                tokens = generate(accelerator, model, inputs, **options)
                for ids in tokens[: len(prompts), inputs["input_ids"].shape[1] :].tolist():
                    end = next((n for n, token in enumerate(ids, 1) if token in self._ends), None)
                    written.append((ids[:end], end is None))
        model.train()
        return written


@contextlib.contextmanager
def gathered(model: Any, accelerator: Accelerator, is_wanted: bool) -> Generator[None]:
    """Have FSDP2 keep all weights whole on each rank within this context, if that is wanted.

    Otherwise, and under FSDP1 and ZeRO-3, layers are gathered for each token.
    """
    parts = [part for part in model.modules() if isinstance(part, FSDPModule) and is_wanted]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        if fsdp_plugin(accelerator).reshard_after_forward and part is not model:
            part.set_reshard_after_forward(True, recurse=False)
        part.reshard()
