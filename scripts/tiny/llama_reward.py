# SPDX-License-Identifier: Apache-2.0
"""A Llama, and pairs of a right and a wrong answer, as for llama_dpo.

FOLDER/data has train.jsonl and test.jsonl, rows of {"prompt", "chosen", "rejected"} and more. Each
skill has one typical mistake, which a reward model learns to tell from the right answer, for words
and numbers that it never saw.
"""

from dataclasses import replace

from tiny import llama_dpo
from tiny.maker import Row

MAKER = replace(llama_dpo.MAKER, num_rows=(4000, 300))


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test."""
    files = llama_dpo.make_rows(num_train_rows, num_test_rows, seed)
    return {split: files[split] for split in ("train", "test")}
