# SPDX-License-Identifier: Apache-2.0
"""Bad rows stop the recipe itself before the model loads, and no mangled row gets past the reader
or breaks it.

tests/unit/components/test_rows.py has all kinds of bad files."""

import json
import random
import re
import shutil

import datasets
import pytest
from transformers import AutoTokenizer

import llama
from components.chat_template import ChatTemplate
from components.cli import parse_arguments
from launching import recipe
from row_files import GOOD


@pytest.fixture
def model_with_torn_weights(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("content", "flags", "code", "says"),
    [
        (
            f"{GOOD}\n{GOOD[:30]}\n",
            [],
            65,
            ["rows.jsonl, line 2: is not JSON", "1 of 2 lines", "--skip_bad_rows"],
        ),
        (
            f"{GOOD}\n{GOOD[:30]}\n",
            ["--skip_bad_rows"],
            64,
            ["no model: SafetensorError"],
        ),  # past the rows
        (
            f"{GOOD}\n" * 8 + "caf\xe9\n",
            ["--dataset_num_proc", 2],
            65,
            ["rows.jsonl, line 9: ", "'utf-8' codec"],
        ),
    ],
    ids=["torn", "torn and left out", "Latin-1, two processes"],
)
def test_bad_rows_stop_the_recipe_before_it_reads_weights(
    content, flags, code, says, model_with_torn_weights, tmp_path
):
    (tmp_path / "rows.jsonl").write_bytes(content.encode("latin-1"))
    done = recipe(
        "--model_name_or_path",
        model_with_torn_weights,
        "--dataset_name",
        tmp_path / "rows.jsonl",
        "--output_dir",
        tmp_path / "run",
        *flags,
    )
    message = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert done.returncode == code and 1 <= len(message) <= 6, done.output
    assert all(word in "\n".join(message) for word in says) and "Traceback" not in done.output, (
        done.output
    )


SEEDS = [
    GOOD.encode(),
    *(
        json.dumps(row, ensure_ascii=False).encode()
        for row in [
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "one"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "two"},
                ],
                "skill": None,
            },
            {
                "instruction": "Übersetze.\u2028",
                "input": "猫 \ufffd",
                "output": "cat\n",
                "score": [1.5e3, -2, {"x": True}],
            },
            {"question": "1 + 1?\x7f", "answer": "2", "messages": None},
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "😀"}],
            },
        ]
    ),
]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b'"',
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b'""',
    b'" "',
    b"\\",
    b"\\ud800",
    b"\\u0000",
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"\x85",
    b"\x1a",
    b'"role": "user", ',
    b'"role": "tool"',
    b'"content": 5',
    b'"messages": [], ',
    b"\t",
    b"[" * 3000,
]
WORDS = [
    b'"a"',
    b'"b"',
    b'"user"',
    b'"assistant"',
    b'"role"',
    b'"content"',
    b'"messages"',
    b'"prompt"',
]


def mangled(line, chance):
    """A line with one to three changes.

    A byte is replaced, bytes are deleted or doubled, or a token is put in or swapped.
    """
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        i = chance.randrange(len(line) + 1)
        j = min(len(line), i + chance.choice([1, 1, 2, 5, 20, 80]))
        token = chance.choice(TOKENS)
        other = chance.choice(TOKENS)
        word = chance.choice(WORDS)
        line = chance.choice(
            [
                line[:i] + bytes([chance.randrange(256)]) + line[i + 1 :],
                line[:i] + line[j:],
                line[:j] + line[i:],
                line[:i] + token + line[i:],
                line.replace(token, other, 1),
                line.replace(word, token, 1),
            ]
        )
    return line


def test_ten_thousand_mangled_rows_break_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    kept = 0
    left_out = 0
    for seed in range(4):
        chance = random.Random(seed)
        path = tmp_path / f"rows{seed}.jsonl"
        path.write_bytes(b"\n".join(mangled(chance.choice(SEEDS), chance) for _ in range(2500)))
        words = ["--dataset_name", str(path), "--skip_bad_rows", "--max_length", "64"]
        args = parse_arguments(llama.Arguments, words=words)
        rows, _ = llama.load_data(args, tokenizer)
        lines = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for row in rows.dataset.with_format(None):
            supervised = [label for label in row["labels"] if label != -100]
            assert supervised and 1 < len(row["input_ids"]) == len(row["labels"]) <= 64
            line = lines[row["row"] - 1].decode()  # UTF-8, and the very line that the number says
            expected = llama.tokenize_row(
                json.loads(line.removeprefix("\ufeff")), ChatTemplate(tokenizer), 64
            )
            assert (row["input_ids"], row["labels"]) == (expected["input_ids"], expected["labels"])
        kept += len(rows)
        left_out += int(re.search(r"(\d+) left out", rows.notes)[1])
    assert kept > 2000 and left_out > 4000  # changes in a text leave a good row
