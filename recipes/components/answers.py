# SPDX-License-Identifier: Apache-2.0
"""Answers that a language model generates for evaluation rows while it is trained.

The prompt is what the model reads in training: the tokens of the prepared row before its last
answer. Nothing is rendered a second time. Every rank answers its part of the rows, and all ranks
generate as often.
"""

import contextlib
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from components import varlen
from components.generation import (
    answer_in,
    generate,
    greedy_options,
    listed_stop_tokens,
    most_positions,
    stop_tokens_of_texts,
)
from components.predictions import NUM_SHOWN, SHOWN_LETTERS, show_prediction, write_predictions
from core.batches import Line, Plan, rows_of_lines
from core.chat import ChatTemplate
from core.data import IGNORED, Rows
from core.exits import Exit, fail
from core.metrics import log_table
from core.run import Run

SHORT_ANSWER = 32  # tokens; a longer answer may be right in other words than the row's


class HasPredictionArguments(Protocol):
    """What has the arguments of PredictionArguments, and the folder of RunArguments."""

    @property
    def predict_with_generate(self) -> bool: ...
    @property
    def num_predictions(self) -> int: ...
    @property
    def generation_max_new_tokens(self) -> int: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...
    @property
    def output_dir(self) -> str: ...


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


def spread_over(num_rows: int, count: int) -> list[int]:
    """Return the numbers of `count` rows, or of all if there are fewer, spread over all of them.

    The first rows of a file may all be of one kind.
    """
    count = min(count, num_rows)
    return [number * num_rows // count for number in range(count)]


def length_of_answer(answer: Sequence[int], ends: Collection[int]) -> int | None:
    """Return the number of tokens before the first one that ends an answer, or None without one."""
    for token_index, token in enumerate(answer):
        if token in ends:
            return token_index
    return None


def length_of_reference(
    answer: Sequence[int], turn_ends: Collection[int], tokenizer: Any
) -> int | None:
    """Return the number of tokens before the one that ends a row's answer, or None if it was cut.

    That is the last token, but for white space: tokens that may end a turn, such as the <think> of
    some tokenizers, may also be inside.
    """
    for token_index in reversed(range(len(answer))):
        if answer[token_index] in turn_ends:
            return token_index
        if tokenizer.decode([answer[token_index]]).strip():
            return None
    return None


@dataclass(frozen=True)
class Question:
    """A row whose last answer the model is to give.

    Attributes:
        prompt: the tokens before that answer, as a text with its special tokens.
        shown: the same without them.
        reference: the row's own answer.
        length: the tokens of the reference, or None if its end was cut off.
        room: the most tokens of the model's answer, whatever the other rows of its batch leave.
    """

    prompt: str
    shown: str
    reference: str
    length: int | None
    room: int

    @property
    def has_one_answer(self) -> bool:
        """Whether an answer is right only if it is equal to the reference.

        A reference that is longer than the room is out of reach, and says nothing about the model.
        """
        return self.length is not None and self.length <= min(SHORT_ANSWER, self.room)


def read_question(
    row: Mapping[str, Any], template: ChatTemplate, turn_ends: Collection[int], room: int
) -> Question:
    """Return the question that a prepared row asks.

    A row whose end was cut off has no whole reference to compare with.

    Args:
        turn_ends: the tokens that may end a turn.
        room: as a Question has it.
    """
    tokenizer = template.tokenizer
    tokens = row["input_ids"].tolist()
    start, _ = last_answer(row["labels"])
    answer, length = read_reference(row, turn_ends, tokenizer)
    written = tokenizer.decode(answer[:length], skip_special_tokens=True).strip()
    reference = answer_in(template, written)
    if length is not None and reference != written:
        length = len(tokenizer(reference, add_special_tokens=False)["input_ids"])
    return Question(
        prompt=tokenizer.decode(tokens[:start]),
        shown=tokenizer.decode(tokens[:start], skip_special_tokens=True),
        reference=reference,
        length=length,
        room=room,
    )


def read_reference(
    row: Mapping[str, Any], turn_ends: Collection[int], tokenizer: Any
) -> tuple[list[int], int | None]:
    """Return the tokens of a prepared row's last answer, and how many are before its end.

    None instead of that number if the row was cut, even if the last token that is left may end a
    turn.
    """
    start, end = last_answer(row["labels"])
    answer = row["input_ids"][start:end].tolist()
    if row["truncated"]:
        return answer, None
    return answer, length_of_reference(answer, turn_ends, tokenizer)


def ends_of_turns(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that may end a turn."""
    texts = ChatTemplate(tokenizer).end_tokens
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.content in texts}


def ends_of_answers(rows: Rows, numbers: Sequence[int], tokenizer: Any) -> set[int]:
    """Return the tokens that end the last answers of these rows."""
    turn_ends = ends_of_turns(tokenizer)
    found = set()
    for number in numbers:
        answer, length = read_reference(rows.dataset[number], turn_ends, tokenizer)
        if length is not None:
            found.add(answer[length])
    return found


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
        if not prompts:  # A rank without rows takes part with one token.
            prompts = [np.array([self.pad_token_id])]
        width = max(len(prompt) for prompt in prompts)
        ids = np.full((len(prompts), width), self.pad_token_id)
        mask = np.zeros_like(ids)
        for number, prompt in enumerate(prompts):
            ids[number, width - len(prompt) :] = prompt
            mask[number, width - len(prompt) :] = 1
        return {
            "inputs": {
                "input_ids": torch.from_numpy(ids),
                "attention_mask": torch.from_numpy(mask),
            },
            "row": [int(row["row"]) for row in rows],
        }


# ---- Answers ----
class Predictor:
    """What answers the same evaluation rows again and again while a model is trained."""

    def __init__(
        self,
        args: HasPredictionArguments,
        run: Run,
        accelerator: Accelerator,
        plan: Plan,
        rows: Rows | None,
        tokenizer: Any,
        model: Any,
    ) -> None:
        """Choose the rows. Ends with 64 if there are none, or none with a prompt.

        Args:
            rows: the evaluation rows, prepared, with the columns input_ids and labels.
            model: one that takes the longest of them.
        """
        if rows is None:
            fail(
                Exit.USAGE,
                "--predict_with_generate needs rows to evaluate on: pass --eval_dataset_name, "
                "--eval_split, or a --dataset_test_split that the data set has",
            )
        self._run = run
        self._accelerator = accelerator
        self._layout = plan.layout
        self._template = ChatTemplate(tokenizer, args.chat_template_kwargs or {})
        self._output_dir = Path(args.output_dir)
        self._max_new_tokens = args.generation_max_new_tokens
        positions = most_positions(model.config)
        rooms = {}
        for number in spread_over(len(rows), args.num_predictions):
            start, _ = last_answer(rows.dataset[number]["labels"])
            if start > 0:
                rooms[number] = min(self._max_new_tokens, positions - start)
        if not rooms:
            fail(
                Exit.USAGE,
                "--predict_with_generate needs rows with a prompt that is not trained on: leave "
                "out --no_completion_only_loss and --no_assistant_only_loss",
            )
        turn_ends = ends_of_turns(tokenizer)
        self._ends = ends_of_answers(rows, list(rooms), tokenizer) | stop_tokens_of_texts(tokenizer)
        self._questions: dict[int, Question] = {}  # by the number of the row in its file
        for number, room in rooms.items():
            row = rows.dataset[number]
            self._questions[int(row["row"])] = read_question(row, self._template, turn_ends, room)
        collator = PromptCollator(tokenizer.pad_token_id)
        self._loaders: dict[int, DataLoader] = {}  # by the room of their rows
        for room in sorted(set(rooms.values())):
            numbers = [number for number in rooms if rooms[number] == room]
            self._loaders[room] = plan.ordered_loader(rows, collator, numbers)

    def __str__(self) -> str:
        """Return what is generated in each evaluation, for the summary of a run."""
        room = self._max_new_tokens
        num_short = sum(question.has_one_answer for question in self._questions.values())
        limit = f"at most {room} new tokens each"
        shortest = min(self._loaders)
        if shortest < room:
            limit += f" (the model has positions for {shortest} after the longest prompt)"
        return (
            f"{len(self._questions)} rows in each evaluation, {limit}; "
            f"{num_short} have an answer of at most {min(SHORT_ANSWER, room)} tokens, which exact "
            "match counts"
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
        with (
            attending_to_padded_rows(unwrapped),
            self._layout.heeding_masks(unwrapped),
        ):
            for room, loader in self._loaders.items():
                options["max_new_tokens"] = room
                for batch in self._run.interruptible(loader):
                    tokens = generate(self._accelerator, model, batch["inputs"], **options)
                    width = batch["inputs"]["input_ids"].shape[1]
                    # Not strict: a rank without rows generates a text that belongs to no row.
                    answers += zip(batch["row"], tokens[:, width:].tolist(), strict=False)
        predictions = []
        for row, answer in sorted(self._layout.gather(answers)):
            predictions.append(self._judge(row, answer, options))
        if self._accelerator.is_main_process:
            self._keep(predictions)
        verdicts = [line["correct"] for line in predictions if line["correct"] is not None]
        if not verdicts:
            return {}
        return {"eval_exact_match": sum(verdicts) / len(verdicts)}

    def _options(self, model: Any) -> dict[str, Any]:
        """Return the arguments of transformers' generate for a model of transformers or of peft."""
        ends = listed_stop_tokens(model.generation_config) | self._ends
        return greedy_options(model) | {
            "eos_token_id": sorted(ends),
            "pad_token_id": self._template.tokenizer.pad_token_id,
            "use_cache": True,
        }

    def _judge(self, row: int, tokens: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line of the file: a row's number, prompt, answer and reference.

        `correct` is whether the last two are equal, or None if that says nothing.

        Args:
            tokens: the answer.
            options: those with which it was generated.
        """
        question = self._questions[row]
        length = length_of_answer(tokens, options["eos_token_id"])
        written = self._template.tokenizer.decode(tokens[:length], skip_special_tokens=True)
        answer = answer_in(self._template, written)
        correct = None
        if question.has_one_answer:
            correct = answer == question.reference
        return {
            "row": row,
            "prompt": question.prompt,
            "answer": answer,
            "reference": question.reference,
            "correct": correct,
        }

    def _keep(self, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Write all predictions, and show some in the terminal and the tracker."""
        step = self._run.step
        write_predictions(predictions, Path(self._output_dir, f"predictions-{step}.jsonl"))
        shown = list(islice(predictions, NUM_SHOWN))
        for line in shown:
            # The end of a prompt is the question
            prompt = self._questions[line["row"]].shown[-SHOWN_LETTERS:]
            show_prediction(prompt, line["answer"], line["reference"])
        log_table(self._accelerator, "predictions", shown, step)


def make_predictor(
    args: HasPredictionArguments,
    run: Run,
    accelerator: Accelerator,
    plan: Plan,
    rows: Rows | None,
    tokenizer: Any,
    model: Any,
) -> Predictor | None:
    """Return what answers evaluation rows, or None without --predict_with_generate.

    Args: those of `Predictor`.
    """
    if not args.predict_with_generate:
        return None
    return Predictor(args, run, accelerator, plan, rows, tokenizer, model)


def describe_predictions(predictor: Predictor | None) -> dict[str, str]:
    """Return the line of the start summary about the answers; nothing if none are generated."""
    if predictor is None:
        return {}
    return {"predictions": str(predictor)}


@contextlib.contextmanager
def attending_to_padded_rows(model: Any) -> Generator[None]:
    """Within this context, attend by sdpa instead of varlen, which takes no padded rows."""
    if model.config._attn_implementation != varlen.NAME:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(varlen.NAME)
