# SPDX-License-Identifier: Apache-2.0
r"""Instruction tuning over a pipeline: each rank has some of the layers of a Llama-like model.

The YAML file gives ranks and precision, the command line the pipeline and everything about
learning:

    accelerate launch --config_file accelerate_configs/pp.yaml --num_processes 2 \
        recipes/llama_pipeline.py --pp_size 2
    accelerate launch --config_file accelerate_configs/pp.yaml --num_processes 8 \
        recipes/llama_pipeline.py --pp_size 4 --shard_stages --pipeline_schedule zbv \
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name rows.jsonl \
        --per_device_train_batch_size 16

It is for models that fit on no host even when FSDP shards them, or for links between hosts that
are too slow for FSDP: only hidden states go from stage to stage. Where FSDP works, it needs no
micro-batches and never waits: use recipes/llama.py. Run and result are the same: the same command
again continues from the newest checkpoint, which recipes/llama.py can continue too, and the other
way round. Exit codes: components/exits.py. To make it yours: python scripts/copy_recipe.py
llama_pipeline my_project, then look for EDIT.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from components.arguments import (
    CommonArguments,
    InstructionTuningArguments,
    LengthArguments,
    LossInHeadArguments,
    MixtureArguments,
    PipelineArguments,
    RowArguments,
    SamplingArguments,
)
from components.cli import arg
from components.startup import start


@dataclass(kw_only=True)
class Arguments(
    PipelineArguments,
    MixtureArguments,
    InstructionTuningArguments,
    SamplingArguments,
    RowArguments,
    LengthArguments,
    LossInHeadArguments,
    CommonArguments,
):
    """Instruction tuning over a pipeline."""

    GROUP: ClassVar[str] = "Batches of rows"
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M"
    # EDIT: your data set. Default: 2,260 rows (Apache-2.0 license)
    dataset_name: list[str] = field(default_factory=lambda: ["HuggingFaceTB/smoltalk"])
    output_dir: str = "runs/llama_pipeline"
    # Columns of PROMPT_AND_ANSWER, which is after the imports below, and those that go with them
    COLUMN_ROLES: ClassVar[Sequence[str]] = (
        "messages",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "question",
        "answer",
        "system",
        "tools",
    )
    columns: list[str] = arg(
        [],
        "your columns as ROLE=COLUMN, as in prompt=question completion=answer; roles are "
        "messages, or prompt and completion, or instruction, input and output, or question and "
        "answer; with any of these, system and tools",
    )
    packing: bool = arg(
        False,
        "pack whole rows into sequences of --max_length tokens, without attention between rows; "
        "batch sizes then count packed sequences",
    )

    def find_own_conflicts(self) -> Iterator[str]:
        if self.use_peft:
            yield (
                "--use_peft: adapters leave so little to train that layers need not be split over "
                "a pipeline: use recipes/llama.py with fsdp2_full_shard.yaml"
            )
        if self.packing and self.train_sampling_strategy == "group_by_length":
            yield (
                "--train_sampling_strategy group_by_length is for padded rows, and packed "
                "sequences all have one length: use random"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name == ["HuggingFaceTB/smoltalk"] and self.dataset_config is None:
            self.dataset_config = "everyday-conversations"


if __name__ == "__main__":
    # Here and not at the end, since the imports below (torch, transformers) take seconds: a wrong
    # flag is refused before them
    args = start(Arguments, __doc__)

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

from components.accelerator import make_accelerator
from components.batches import BatchPlan, Line, OnePerLine, best_fit
from components.chat import load_tokenizer, show_trained_tokens, tokenize_conversation
from components.chat_template import ChatTemplate
from components.conversations import Conversation, read_conversation, trains_on_answers_only
from components.export import save_model
from components.head_loss import LossInHead
from components.mixture import read_splits
from components.model import load_pretrained, outline_of, set_up_layers
from components.model_checks import check_model
from components.neftune import add_neftune
from components.optimizer import make_optimizer
from components.packing import TokenCollator, describe_packing
from components.perplexity import log_perplexity
from components.pipeline import Pipeline
from components.pipeline_batches import PipelineCollator
from components.pipeline_checks import check_stages, num_microbatches
from components.pipeline_mesh import PipelineMesh
from components.pipeline_stages import PartOfModel, Stage
from components.rows import Rows, describe_rows, longest_row
from components.run import Run

# EDIT: your columns, {prompt: answer}; a column named messages needs no entry
PROMPT_AND_ANSWER = {"prompt": "completion", "instruction": "output", "question": "answer"}


# ---- Data ----
def row_to_conversation(
    row: Mapping[str, Any], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return a row as a conversation; a ValueError says why it is not one. EDIT: your columns.

    Args:
        columns: {role: name of its column}, from --columns.
    """
    return read_conversation(row, PROMPT_AND_ANSWER, columns)


def tokenize_row(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    learn: str = "all",
    completion_only_loss: bool = True,
    assistant_only_loss: bool = True,
) -> dict[str, Any]:
    """Return the tokens of a row and their labels: by default, the answers are trained on."""
    conversation = row_to_conversation(row, columns)
    if learn == "last":
        conversation = conversation.with_last_answer_only()
    answers_only = trains_on_answers_only(row, columns, completion_only_loss, assistant_only_loss)
    return tokenize_conversation(row, conversation, template, max_length, answers_only)


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    columns = args.columns_by_role
    prepare = partial(
        tokenize_row,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        max_length=args.max_length,
        columns=columns,
        learn=args.learn,
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
    )
    # EDIT: to filter rows, change what read_splits returns, as in
    #     train_rows, eval_rows = read_splits(...)
    #     dataset = train_rows.dataset.filter(lambda row: row["length"] >= 8)
    #     return dataclasses.replace(train_rows, dataset=dataset), eval_rows
    return read_splits(
        args,
        prepare,
        evaluate=args.eval_strategy != "no",
        text_columns=list(columns.values()),
    )


def lay_out(lengths: np.ndarray, args: Arguments) -> Sequence[Line]:
    """Return the rows of each line: one, or with --packing as many as fit into --max_length."""
    if args.packing:
        # best_fit starts with the longest rows. Sorted by their first row, lines follow the order
        # of the file, which --train_sampling_strategy sequential keeps.
        return sorted(best_fit(lengths, args.max_length), key=min)
    return OnePerLine(len(lengths))


