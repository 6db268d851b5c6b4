# SPDX-License-Identifier: Apache-2.0
"""Answers that a language model generates for evaluation rows while it is trained.

The prompt is what the model reads in training: the tokens of the prepared row before its last
answer. Nothing is rendered a second time. Every rank answers its part of the rows, and all ranks
generate as often.
"""

import contextlib
import json
import textwrap
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from core.batches import Line, Plan, rows_of_lines
from core.chat import ChatTemplate
from core.data import IGNORED, Rows
from core.exits import Exit, fail
from core.generation import (
    NUM_SHOWN,
    SHOWN_LETTERS,
    answer_in,
    generate,
    greedy_options,
    listed_stop_tokens,
    most_positions,
    show_prediction,
    write_predictions,
)

SHORT_ANSWER = 32  # tokens; a longer answer may be right in other words than the row's


# ---- Rows ----
def last_answer(labels: np.ndarray) -> tuple[int, int]:
    """Return where the last tokens that are trained on begin, and where they end.

    Args:
        labels: of a prepared row, [tokens], of which at least one is trained on.
    """
    token_indices = np.flatnonzero(labels != IGNORED)
    gaps = np.flatnonzero(np.diff(token_indices) > 1)
    first = gaps[-1] + 1 if len(gaps) else 0
    return int(token_indices[first]), int(token_indices[-1]) + 1


def length_of_answer(answer: Sequence[int], ends: Collection[int]) -> int | None:
    """Return the number of tokens before the first one that ends an answer, or None without one."""
    return next((index for index, token in enumerate(answer) if token in ends), None)


@dataclass(frozen=True)
class Question:
    """A row whose last answer the model is to give.

    Attributes:
        prompt: the tokens before that answer, as a text with its special tokens.
        shown: the same without them.
        reference: the row's own answer.
        has_one_answer: whether an answer is right only if it is equal to the reference: one that is
            whole, short, and not longer than the tokens that may be generated.
    """

    prompt: str
    shown: str
    reference: str
    has_one_answer: bool


def read_question(
    row: Mapping[str, Any], template: ChatTemplate, ends: Collection[int], room: int
) -> Question:
    """Return the question that a prepared row asks.

    Args:
        ends: the tokens that end an answer.
        room: the most tokens of the model's answer.
    """
    tokenizer = template.tokenizer
    tokens = row["input_ids"].tolist()
    start, end = last_answer(row["labels"])
    answer = tokens[start:end]
    length = length_of_answer(answer, ends)  # None if the row was cut
    written = tokenizer.decode(answer[:length], skip_special_tokens=True).strip()
    reference = answer_in(template, written)
    if length is not None and reference != written:
        length = len(tokenizer(reference, add_special_tokens=False)["input_ids"])
    return Question(
        prompt=tokenizer.decode(tokens[:start]),
        shown=tokenizer.decode(tokens[:start], skip_special_tokens=True),
        reference=reference,
        has_one_answer=length is not None and length <= min(SHORT_ANSWER, room),
    )


@dataclass(frozen=True)
class PromptCollator:
    """Make a batch of the prompts before the last answers of rows, padded on the left.

    A batch has:
        inputs: input_ids and attention_mask, [rows, tokens].
        row: the numbers of the rows in their file, from 1, on the host.
    """

    columns: ClassVar[list[str]] = ["input_ids", "labels", "row"]
    pad_token_id: int

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        rows = rows_of_lines(source, lines)
        prompts = [row["input_ids"][: last_answer(row["labels"])[0]] for row in rows]
        if not prompts:  # A rank without rows takes part with one token
            prompts = [np.array([self.pad_token_id])]
        width = max(len(prompt) for prompt in prompts)
        ids = np.full((len(prompts), width), self.pad_token_id)
        mask = np.zeros_like(ids)
        for number, prompt in enumerate(prompts):
            ids[number, width - len(prompt) :] = prompt
            mask[number, width - len(prompt) :] = 1
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return {"inputs": inputs, "row": [int(row["row"]) for row in rows]}


# ---- Answers ----
class Predictor:
    """What answers the same evaluation rows again and again while a model is trained."""

    def __init__(
        self,
        args: Any,
        run: Any,
        accelerator: Accelerator,
        plan: Plan,
        rows: Rows | None,
        tokenizer: Any,
        model: Any,
    ) -> None:
        """Choose the rows, spread over all: the first of a file may all be of one kind.

        Ends with 64 if there are none, or none with a prompt.

        Args:
            run: has the step, and evaluations that can be interrupted.
            rows: the evaluation rows, prepared, with the columns input_ids and labels.
            model: one that takes the longest of them.
        """
        if rows is None:
            problem = "--predict_with_generate needs rows to evaluate on"
            fail(Exit.USAGE, f"{problem}: see --eval_split and --eval_strategy")
        self._run = run
        self._accelerator = accelerator
        self._layout = plan.layout
        self._template = ChatTemplate(tokenizer, args.chat_template_kwargs or {})
        self._folder = Path(args.output_dir)
        self._ends = self._template.stop_tokens() | listed_stop_tokens(model.generation_config)
        positions = most_positions(model.config)
        count = min(args.num_predictions, len(rows))
        self._questions: dict[int, Question] = {}  # by the number of the row in its file
        numbers: dict[int, list[int]] = {}  # of rows, by the most tokens of their answers
        for number in [index * len(rows) // count for index in range(count)]:
            row = rows.dataset[number]
            start, _ = last_answer(row["labels"])
            if start > 0:
                room = min(args.generation_max_new_tokens, positions - start)
                numbers.setdefault(room, []).append(number)
                question = read_question(row, self._template, self._ends, room)
                self._questions[int(row["row"])] = question
        if not numbers:
            fail(
                Exit.USAGE,
                "--predict_with_generate needs rows with a prompt that is not trained on: leave "
                "out --no_completion_only_loss and --no_assistant_only_loss",
            )
        collator = PromptCollator(tokenizer.pad_token_id)
        self._loaders: dict[int, DataLoader] = {}
        for room in sorted(numbers):
            self._loaders[room] = plan.ordered_loader(rows, collator, numbers[room])

    def __str__(self) -> str:
        """Return what is generated in each evaluation, for the summary of a run."""
        num_short = sum(question.has_one_answer for question in self._questions.values())
        return (
            f"{len(self._questions)} rows in each evaluation, at most {max(self._loaders)} new "
            f"tokens each; exact match counts {num_short} with a short answer"
        )

    @torch.no_grad()
    def predict(self, model: torch.nn.Module) -> dict[str, float]:
        """Answer the rows, write predictions-STEP.jsonl, and return the metrics of the answers.

        Args:
            model: as `prepare` returned it, in evaluation mode. It must have run a forward pass
                before, and its head must return logits.

        Returns:
            {"eval_exact_match": the share of right answers, 0 to 1, among the rows whose answer is
            short}; nothing if no row has a short answer.
        """
        unwrapped: Any = self._accelerator.unwrap_model(model)
        options = self._options(unwrapped)
        answers: list[tuple[int, list[int]]] = []
        with attending_to_padded_rows(unwrapped), self._layout.heeding_masks(unwrapped):
            for room, loader in self._loaders.items():
                options["max_new_tokens"] = room
                for batch in self._run.interruptible(loader):
                    tokens = generate(self._accelerator, model, batch["inputs"], **options)
                    width = batch["inputs"]["input_ids"].shape[1]
                    # Not strict: a rank without rows generates a text that belongs to no row
                    answers += zip(batch["row"], tokens[:, width:].tolist(), strict=False)
        lines = []
        for row, answer in sorted(self._layout.gather(answers)):
            lines.append(self._judge(row, answer, options["eos_token_id"]))
        if self._accelerator.is_main_process:
            self._keep(lines)
        verdicts = [line["correct"] for line in lines if line["correct"] is not None]
        return {"eval_exact_match": sum(verdicts) / len(verdicts)} if verdicts else {}

    def _options(self, model: Any) -> dict[str, Any]:
        """Return the arguments of transformers' generate for a model of transformers or of peft."""
        return greedy_options(model) | {
            "eos_token_id": sorted(self._ends),
            "pad_token_id": self._template.tokenizer.pad_token_id,
            "use_cache": True,
        }

    def _judge(self, row: int, tokens: Sequence[int], ends: Collection[int]) -> dict[str, Any]:
        """Return a line of the file: a row's number, prompt, answer and reference.

        `correct` is whether the last two are equal, or None if that says nothing.
        """
        question = self._questions[row]
        length = length_of_answer(tokens, ends)
        written = self._template.tokenizer.decode(tokens[:length], skip_special_tokens=True)
        answer = answer_in(self._template, written)
        return {
            "row": row,
            "prompt": question.prompt,
            "answer": answer,
            "reference": question.reference,
            "correct": answer == question.reference if question.has_one_answer else None,
        }

    def _keep(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write all predictions, and show some in the terminal and the tracker."""
        step = self._run.step
        write_predictions(lines, self._folder / f"predictions-{step}.jsonl")
        shown = lines[:NUM_SHOWN]
        for line in shown:
            # The end of a prompt is the question
            prompt = self._questions[line["row"]].shown[-SHOWN_LETTERS:]
            show_prediction(prompt, line["answer"], line["reference"])
        show_in_trackers(self._accelerator, shown, step)


def show_in_trackers(
    accelerator: Accelerator, lines: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Log predictions to the trackers that show tables or texts. Only rank 0 may call it."""
    columns = list(lines[0])
    cells = [[str(line[column]) for column in columns] for line in lines]
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table("predictions", columns=columns, data=cells, step=step)
        elif tracker.name == "tensorboard":
            writer: Any = tracker.tracker
            text = json.dumps(lines, indent=2, ensure_ascii=False)
            writer.add_text("predictions", textwrap.indent(text, "    "), step)  # Markdown's code
            writer.flush()


@contextlib.contextmanager
def attending_to_padded_rows(model: Any) -> Generator[None]:
    """Within this context, attend by sdpa instead of varlen, which takes no padded rows."""
    if model.config._attn_implementation != "varlen":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation("varlen")
