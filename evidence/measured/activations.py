# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rank's autograd keeps of a row, if several ranks share its tokens.

Each launch rehearses recipes/llama.py on one row of each length, a step each, and every rank
measures its forward passes (activation_probe.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measured.rehearsals import Mesh, make_model, rehearse, words_of

Row = dict[str, Any]

LENGTHS = (512, 1024, 2048, 4096)  # tokens
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
    "max_position_embeddings": max(LENGTHS),
}


class Group(NamedTuple):
    """Ranks that share each row."""

    kind: str  # cp or sp; "" for one process
    mesh: Mesh


def groups_of(kind: str, config: str, *sizes: str) -> Iterator[Group]:
    """Yield the groups of a kind under a YAML, with these sizes besides that of the group."""
    for ranks in (2, 4):
        own = f"{kind}_size={ranks}"
        mesh = Mesh(config, ranks, (*sizes, own))
        yield Group(kind, mesh)


ONE_PROCESS = Group("", Mesh("single", 1))
GROUPS = (
    ONE_PROCESS,
    *groups_of("cp", "fsdp2_cp", "dp_shard_size=1"),
    *groups_of("sp", "deepspeed_ulysses"),
)


def make_model_and_rows(folder: Path) -> None:
    """Write a model, and a row of each length, the shortest first."""
    make_model(folder, SHAPE)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    with open(folder / "rows.jsonl", "w") as file:
        for length in LENGTHS:
            row = row_of(length, tokenizer)
            print(json.dumps(row), file=file)


def row_of(length: int, tokenizer: Any) -> dict[str, str]:
    """Return a row of a number of tokens as the recipe sees it; its tokenizer splits digits.

    Raises ValueError if repeating a digit does not make so many.
    """
    from planner.recipe import labels_of

    def with_digits(number: int) -> dict[str, str]:
        return {"prompt": "Say:", "completion": "7" * number}

    def tokens_of(number: int) -> int:
        return len(labels_of(with_digits(number), tokenizer, 2 * length))

    others = tokens_of(1) - 1
    number = length - others
    made = tokens_of(number)
    if made != length:
        raise ValueError(f"{number} digits make {made} tokens, not {length}")
    return with_digits(number)


def measure(group: Group, tiny: Path, folder: Path) -> Row:
    """Launch a group of ranks; return its row, with {tokens of a row: bytes of each rank}.

    Args:
        group: the ranks.
        tiny: the folder of `make_model_and_rows`.
        folder: a new folder for the run.
    """
    flags = {
        "model_name_or_path": tiny / "model",
        "dataset_name": tiny / "rows.jsonl",
        "output_dir": folder / "run",
        "max_length": max(LENGTHS),
        "max_steps": len(LENGTHS),
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "no",
        "save_steps": 0,
    }
    folder.mkdir(parents=True)
    ranks = rehearse(
        group.mesh,
        words_of(flags),
        variable="REHEARSAL_ACTIVATIONS",
        folder=folder / "activations",
        precision="no",
    )
    config, size, sizes = group.mesh[:3]
    kept = {}
    for length in LENGTHS:
        of_rank = str(length // size)
        kept[str(length)] = [found[of_rank] for found in ranks]
    row: Row = {"kind": group.kind, "size": size, "config": config}
    row["sizes"] = list(sizes)
    row["bytes"] = kept
    return row
