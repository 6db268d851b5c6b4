# SPDX-License-Identifier: Apache-2.0
"""Arguments of recipes that no recipe has: one of causal language models, one of classifiers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    LigerArguments,
    LossInHeadArguments,
    RowArguments,
)
from core.cli import arg, parse


@dataclass(kw_only=True)
class LanguageModelArguments(
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    RowArguments,
    LigerArguments,
    LossInHeadArguments,
):
    """Those of a causal language model, and two of the recipe's own with a rule."""

    model_name_or_path: str = "gpt2"
    dataset_name: str = ""
    output_dir: str = "runs/example"
    packing: bool = arg(False, "several rows in a line")
    padding_free: bool = arg(False, "the same within a batch")

    def conflicts(self) -> Iterator[str]:
        if self.packing and self.padding_free:
            yield "--packing and --padding_free: choose one"


@dataclass(kw_only=True)
class ClassifierArguments(CommonArguments, DenseModelArguments):
    """Those of a model without an output head for tokens."""

    model_name_or_path: str = "bert-base-cased"
    dataset_name: str = ""
    output_dir: str = "runs/example"


def language_model_arguments(*flags: str) -> LanguageModelArguments:
    """Return the arguments of a call with these flags."""
    return parse(LanguageModelArguments, words=flags)


@dataclass(frozen=True)
class DataFlags:
    """What the functions that open rows ask of a recipe's arguments."""

    dataset_name: str
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    eval_dataset_name: str | None = None
    eval_strategy: str = "no"
    eval_split: float = 0
    skip_bad_rows: bool = False
    columns_by_role: Mapping[str, str] = field(default_factory=dict)
    COLUMN_ROLES = COLUMN_ARGUMENTS = ()


@dataclass(frozen=True)
class RowFlags(DataFlags):
    """The same of recipes that prepare rows in several processes."""

    dataset_num_proc: int | None = None
    seed: int = 42


@dataclass(frozen=True)
class DocumentFlags(DataFlags):
    """The same of recipes/mistral_pretrain.py."""

    text_column: str = "text"
    streaming: bool = False
    num_eval_documents: int = 0
