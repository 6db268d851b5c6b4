# SPDX-License-Identifier: Apache-2.0
"""Documents are cut into blocks with nothing lost or doubled, and found again after a stop."""

import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch

import mistral_pretrain
from example_arguments import DocumentFlags
from tasks.stream import START, Position, cut_blocks, open_documents, read_documents

END, LENGTH = 1, 8
WORDS = [f"w{i}" for i in range(100)]
GOOD = '{"text": "w1 w2 w3"}\n'


class Tokenizer:
    """A token per word, so that tests can say what they expect."""

    eos_token_id = END

    def __call__(self, text, **_):
        tokens = [10 + int(word[1:]) for word in text.split()]
        return {"input_ids": tokens, "special_tokens_mask": [0] * len(tokens)}


@dataclass(frozen=True)
class Arguments(DocumentFlags):
    """What the arguments of recipes/mistral_pretrain.py have."""

    dataset_name: str = ""
    shuffle_buffer_size: int = 4
    seed: int = 3
    max_length: int = LENGTH


@pytest.fixture(params=[False, True], ids=["with random access", "streaming"])
def args(request):
    return Arguments(streaming=request.param)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(file, texts): 23 documents of 0 to 30 words in a .jsonl file.

    The longest of them is longer than three blocks.
    """
    rng = np.random.default_rng(0)
    lengths = [30, 0, *rng.integers(1, 20, 21).tolist()]
    texts = [" ".join(rng.choice(WORDS, length).tolist()) for length in lengths]
    path = tmp_path_factory.mktemp("corpus") / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def opened(path, args):
    documents, _ = open_documents(replace(args, dataset_name=str(path)))
    return documents


def read(documents, args, position=START, passes=1):
    """Number, row and position of each document."""
    return read_documents(documents, position, passes, args.seed, args.shuffle_buffer_size)


def blocks_from(documents, args, position=START, passes=1):
    """Blocks from a position on, each with the position behind it, as from a checkpoint."""
    position = Position(**json.loads(json.dumps(asdict(position))))
    numbered = read(documents, args, position, passes)
    return cut_blocks(numbered, documents, Tokenizer(), args.max_length)


def blocks_of(path, args, position=START, passes=1):
    return blocks_from(opened(path, args), args, position, passes)


def tokens_of(text):
    return [10 + int(word[1:]) for word in text.split()] + [END] if text else []


def equal(ours, theirs):
    return all(torch.equal(a, b) and p == q for (a, p), (b, q) in zip(ours, theirs, strict=True))


# ---- Blocks ----
def test_each_token_is_there_once_a_pass_and_nothing_is_padded_but_the_end(corpus, args):
    path, texts = corpus
    blocks = [block for block, _ in blocks_of(path, args)]
    ids, places, numbers = torch.cat([block[:, :-1] for block in blocks], 1)
    assert (numbers == 0).sum() < LENGTH and (numbers[: len(numbers) - LENGTH] > 0).all()
    order = list(dict.fromkeys(numbers[numbers > 0].tolist()))
    assert sorted(order) == [i for i, text in enumerate(texts, 1) if text]
    assert order != sorted(order)
    wanted = sum((tokens_of(texts[number - 1]) for number in order), [])
    assert ids[numbers > 0].tolist() == wanted


def test_each_token_but_the_first_of_its_document_is_predicted_once_also_across_a_cut(corpus, args):
    path, texts = corpus
    predicted = []
    for block, _ in blocks_of(path, args):
        batch = mistral_pretrain.make_batch([block], LENGTH)
        before = block[0, :-1][batch["positions"]]
        predicted += zip(before.tolist(), batch["targets"].tolist(), strict=True)
    tokens = [tokens_of(text) for text in texts]
    wanted = [pair for line in tokens for pair in zip(line, line[1:], strict=False)]
    assert sorted(predicted) == sorted(wanted)


# ---- Order ----
def test_the_next_pass_has_the_same_documents_in_another_order(corpus, args):
    path, texts = corpus
    numbers = [number for number, *_ in read(opened(path, args), args, passes=2)]
    first, second = numbers[: len(texts)], numbers[len(texts) :]
    assert sorted(first) == sorted(second) == list(range(1, len(texts) + 1)) and first != second


# ---- After a stop ----
def test_it_continues_from_any_block_as_if_it_had_not_stopped(corpus, args):
    path, _ = corpus
    whole = list(blocks_of(path, args, passes=2))
    documents = opened(path, args)  # once: another process opens them below
    for stopped in range(1, len(whole)):
        rest = blocks_from(documents, args, whole[stopped - 1][1], passes=2)
        assert equal(rest, whole[stopped:])
    places = [position for _, position in whole]
    # In a document, in a window
    assert any(place.token and place.document % 4 for place in places)


@pytest.mark.parametrize("line", ["{", '{"text": null}', r'{"text": "w1\ud800"}'])
def test_bad_documents_are_counted_once_also_behind_a_stop(line, tmp_path, args):
    args = replace(args, skip_bad_rows=True)
    (tmp_path / "train.jsonl").write_text(f"{GOOD}{line}\n{GOOD}" * 3 + GOOD * 9)
    whole = list(blocks_of(tmp_path, args))
    assert whole[-1][1].left_out == 3
    assert sum(int((block[2, :-1] > 0).sum()) for block, _ in whole) == 4 * 15
    for stopped in range(1, len(whole)):
        assert equal(blocks_of(tmp_path, args, whole[stopped - 1][1]), whole[stopped:])
