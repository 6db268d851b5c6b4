"""Continued pre-training in this process: which tokens a block has, where a stream goes on, what a bad document says,
what a token of a block sees."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, MistralConfig

import mistral_pretrain as recipe
from components.cli import parse_arguments
from components.documents import open_documents
from components.stream import START, Position, cut_blocks, read_documents
from mask_probe import SHAPE, distance_from_alone, leak

END, LENGTH = 1, 8
WORDS = [f"w{i}" for i in range(100)]


class Tokenizer:
    """A token a word, so that tests can say what they expect."""

    eos_token_id = END

    def __call__(self, text, **_):
        return {"input_ids": [10 + int(word[1:]) for word in text.split()]}


def arguments(*flags):
    words = ["--shuffle_buffer_size", "4", "--seed", "3", "--max_length", str(LENGTH), *flags]
    return parse_arguments(recipe.Arguments, words=words)


@pytest.fixture
def corpus(tmp_path):
    """(file, texts): 23 documents of 0 to 30 words in a .jsonl file, the longest of them longer than three blocks."""
    rng = np.random.default_rng(0)
    lengths = [30, 0, *rng.integers(1, 20, 21).tolist()]
    texts = [" ".join(rng.choice(WORDS, length).tolist()) for length in lengths]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def opened(path, args):
    documents, _ = open_documents(replace(args, dataset_name=str(path)), evaluate=False)
    return documents


def read(documents, args, position=START, passes=1):
    """(number, row, position) of each document."""
    return read_documents(documents, position, passes, args.seed, args.shuffle_buffer_size)


def blocks_of(path, args, position=START, passes=1):
    """Blocks from a position on, each with the position behind it, as from a checkpoint."""
    documents = opened(path, args)
    position = Position.from_json(json.loads(json.dumps(position.to_json())))
    numbered = read(documents, args, position, passes)
    return cut_blocks(numbered, documents, Tokenizer(), args.max_length)


def tokens_of(text):
    return [10 + int(word[1:]) for word in text.split()] + [END] if text else []


def equal(ours, theirs):
    return all(torch.equal(a, b) and p == q for (a, p), (b, q) in zip(ours, theirs, strict=True))


@pytest.fixture(params=[False, True], ids=["with random access", "streaming"])
def args(request):
    return arguments("--streaming", str(request.param))


class TestStream:
    def test_each_token_is_there_once_a_pass_and_nothing_is_padded_but_the_end(self, corpus, args):
        path, texts = corpus
        blocks = [block for block, _ in blocks_of(path, args)]
        ids, places, numbers = torch.cat([block[:, :-1] for block in blocks], 1)
        assert (numbers == 0).sum() < LENGTH and (numbers[: len(numbers) - LENGTH] > 0).all()
        order = list(dict.fromkeys(numbers[numbers > 0].tolist()))
        assert sorted(order) == [i for i, text in enumerate(texts, 1) if text] and order != sorted(
            order
        )
        assert ids[numbers > 0].tolist() == sum(
            (tokens_of(texts[number - 1]) for number in order), []
        )

    def test_each_token_but_the_first_of_its_document_is_learnt_once_also_across_a_cut(
        self, corpus, args
    ):
        path, texts = corpus
        learnt = []
        for block, _ in blocks_of(path, args):
            batch = recipe.make_batch([block], LENGTH)
            before = block[0, :-1][batch["positions"]]
            learnt += zip(before.tolist(), batch["targets"].tolist(), strict=True)
        tokens = [tokens_of(text) for text in texts]
        assert sorted(learnt) == sorted(
            pair for line in tokens for pair in zip(line, line[1:], strict=False)
        )

    def test_the_next_pass_has_the_same_documents_in_another_order(self, corpus, args):
        path, texts = corpus
        numbers = [number for number, *_ in read(opened(path, args), args, passes=2)]
        first, second = numbers[: len(texts)], numbers[len(texts) :]
        assert sorted(first) == sorted(second) == list(range(1, len(texts) + 1)) and first != second

    def test_a_pass_goes_over_into_the_next_within_a_block(self, corpus, args):
        path, texts = corpus
        num_tokens = sum(len(tokens_of(text)) for text in texts)
        assert num_tokens % LENGTH  # else there is nothing to see
        blocks = list(islice(blocks_of(path, args, passes=9), num_tokens // LENGTH + 1))
        assert (blocks[-1][0][2] > 0).all() and blocks[-1][1].passes == 1

    def test_it_goes_on_from_any_block_as_if_it_had_not_stopped(self, corpus, args):
        path, texts = corpus
        whole = list(blocks_of(path, args, passes=2))
        for stopped in range(1, len(whole)):
            assert equal(blocks_of(path, args, whole[stopped - 1][1], passes=2), whole[stopped:])
        places = [position for _, position in whole]
        assert any(
            place.token and place.document % 4 for place in places
        )  # in a document, in a window

    def test_files_that_a_stream_has_behind_it_are_not_read_again(self, corpus, tmp_path):
        args, lines = arguments("--streaming"), corpus[0].read_text().splitlines(keepends=True)
        folder = tmp_path / "files"
        folder.mkdir()
        for i in range(3):
            (folder / f"train-{i}.jsonl").write_text("".join(lines[8 * i : 8 * i + 8]))
        whole = list(blocks_of(folder, args))
        stopped = next(i for i, (_, position) in enumerate(whole, 1) if position.document >= 16)
        (folder / "train-0.jsonl").write_text("not JSON\n")
        assert len(whole) > stopped + 3 and equal(
            blocks_of(folder, args, whole[stopped - 1][1]), whole[stopped:]
        )
        with pytest.raises(ValueError, match="train-0.jsonl, line 1"):
            list(blocks_of(folder, args))

    def test_another_seed_is_another_order(self, corpus, args):
        path, _ = corpus
        other = replace(args, seed=4)
        assert not equal(blocks_of(path, args), blocks_of(path, other))

    def test_documents_held_out_are_not_trained_on(self, corpus, args):
        path, texts = corpus
        args.num_eval_documents = 5
        numbers = [number for number, *_ in read(opened(path, args), args)]
        assert sorted(numbers) == list(range(6, len(texts) + 1))

    @pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
    def test_the_summary_names_columns_that_nothing_reads(self, tmp_path, args, kind):
        path = tmp_path / f"train.{kind}"
        table = Dataset.from_list([{"id": f"{i}", "text": "w1 w2", "url": "w3"} for i in range(3)])
        if kind in ("csv", "parquet"):
            getattr(table, f"to_{kind}")(path)
        else:
            table.to_json(path, lines=kind == "jsonl")
        assert opened(path, args).notes == "; not read: id, url"

    def test_a_folder_of_text_files_has_a_document_a_file(self, tmp_path, args):
        (tmp_path / "books" / "old").mkdir(parents=True)
        for i, name in enumerate(["a.txt", "b.txt", "old/c.txt"]):
            (tmp_path / "books" / name).write_text(f"w{i} w{i}\nw{i}\n")
        ids, _, numbers = torch.cat(
            [block[:, :-1] for block, _ in blocks_of(tmp_path / "books", args)], 1
        )
        found = [ids[numbers == number].tolist() for number in (1, 2, 3)]
        assert found == [[10, 10, 10, END], [11, 11, 11, END], [12, 12, 12, END]]


def block(*documents, length=LENGTH):
    """A block of documents, given by number and tokens; what lies behind them is the end of the data."""
    made, filled = torch.zeros(3, length + 1, dtype=torch.int32), 0
    for number, tokens in documents:
        places = range(len(tokens))
        made[:, filled : filled + len(tokens)] = torch.tensor(
            [[*map(int, tokens)], places, [number for _ in places]]
        )
        filled += len(tokens)
    return made


class TestBatch:
    def test_numbers_by_hand(self):
        batch = recipe.make_batch(
            [
                block((7, [11, 12, 13]), (4, [21, 22]), (9, [31, 32, 33, 34])),
                block((9, [34, 35, 1])),
            ],
            LENGTH,
        )
        assert batch["inputs"]["input_ids"].tolist() == [
            [11, 12, 13, 21, 22, 31, 32, 33],
            [34, 35, 1, 0, 0, 0, 0, 0],
        ]
        assert batch["inputs"]["position_ids"].tolist() == [
            [0, 1, 2, 0, 1, 0, 1, 2],
            [0, 1, 2, 0, 0, 0, 0, 0],
        ]
        assert batch["positions"].tolist() == [0, 1, 3, 5, 6, 7, 8, 9]
        assert batch["targets"].tolist() == [12, 13, 22, 32, 33, 34, 35, 1]
        assert batch["counts"].tolist() == [8, 11] and batch["row"] == [4, 7, 9]

    def test_a_rank_without_blocks_has_a_batch_that_adds_nothing(self):
        batch = recipe.make_batch([], LENGTH)
        assert batch["inputs"]["input_ids"].shape == (1, LENGTH)
        assert batch["counts"].tolist() == [0, 0] and batch["row"] == []
        assert len(batch["targets"]) == 0

    def test_for_flash_attention_all_is_one_line_with_the_ends_of_its_documents(self):
        blocks = [
            block((7, [11, 12, 13]), (4, [21, 22]), (9, [31, 32, 33, 34])),
            block((9, range(9))),
        ]
        inputs = recipe.make_batch(blocks, LENGTH, one_line=True)["inputs"]
        assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 2 * LENGTH)
        assert (
            inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 16]
        )
        assert inputs["max_length_q"] == inputs["max_length_k"] == 8


# Two layers, each of which sees four tokens back: what a token tells reaches the eighth behind it and not the ninth
WINDOW, REACH, LONG = 5, 8, 40


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


def mistral(attention, window):
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, sliding_window=window)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(params=[[40], [22, 18], [3, 30, 1, 6]], ids=str)
def long_batch(request):
    """(inputs, owners) of a block, much longer than the window, of documents of these lengths."""
    rng = np.random.default_rng(1)
    documents = [(i, rng.integers(2, 300, length)) for i, length in enumerate(request.param, 1)]
    made = block(*documents, length=LONG)
    inputs = recipe.make_batch([made], LONG)["inputs"]
    return inputs | {"use_cache": False}, made[2, :-1].long()[None]


@torch.no_grad()
def reach(model, inputs, owners):
    """How far on a changed token still changes logits, at most: what is masked changes them by exactly 0."""
    logits, far = model(**inputs).logits, 0
    for i in range(LONG):
        ids = inputs["input_ids"].clone()
        ids[0, i] = (ids[0, i] + 1) % 300
        changed = (model(**inputs | {"input_ids": ids}).logits - logits).abs().amax(-1)[0]
        assert (changed[owners[0] != owners[0, i]] == 0).all() and (changed[:i] == 0).all()
        far = max(far, int(changed.nonzero().max()) - i)
    return far


class TestMasks:
    def test_a_token_sees_its_document_alone_and_of_that_its_window_alone(
        self, attention, long_batch
    ):
        inputs, owners = long_batch
        model = mistral(attention, WINDOW)
        longest = int(owners.unique(return_counts=True)[1].max())
        assert longest > 2 * REACH and reach(model, inputs, owners) == REACH
        assert leak(model, inputs, owners) == 0
        assert distance_from_alone(model, inputs, owners) < 1e-6

    def test_the_probe_finds_a_window_that_is_lost(self, attention, long_batch):
        inputs, owners = long_batch
        longest = int(owners.unique(return_counts=True)[1].max())
        assert reach(mistral(attention, None), inputs, owners) == longest - 1

    def test_the_probe_finds_documents_that_see_each_other(self, attention):
        made = block((1, range(2, 22)), (2, range(22, 43)), length=LONG)
        inputs = recipe.make_batch([made], LONG)["inputs"] | {"use_cache": False}
        del inputs["position_ids"]
        assert leak(mistral(attention, WINDOW), inputs, made[2, :-1].long()[None]) > 0.1


BAD = {  # line, and what is said of it
    "not JSON": ('{"text": "w1', "is not JSON"),
    "no object": ("[1, 2]", "is not a JSON object"),
    "no text column": ('{"body": "w1"}', "has the columns body; needs text: see --text_column"),
    "a number": ('{"text": 5}', "has no text in text: 5"),
    "null": ('{"text": null}', "has no text in text: None"),
    "half a character": (r'{"text": "w1\ud800"}', "surrogates not allowed"),
}
GOOD = '{"text": "w1 w2 w3"}\n'


class TestBadDocuments:
    @pytest.mark.parametrize("name", BAD)
    def test_a_bad_line_is_named_by_file_line_cause_and_fix(self, name, tmp_path, args):
        line, says = BAD[name]
        for i, text in enumerate([GOOD * 3, f"{GOOD}\n{line}\n{GOOD}"]):
            (tmp_path / f"train-{i}.jsonl").write_text(text)
        with pytest.raises(ValueError) as raised:
            list(blocks_of(tmp_path, args))
        for words in (f"{tmp_path}/train-1.jsonl, line 3: ", says, "--skip_bad_rows"):
            assert words in str(raised.value)

    @pytest.mark.parametrize("name", BAD)
    def test_it_is_left_out_and_counted_on_request_also_behind_a_stop(self, name, tmp_path, args):
        args.skip_bad_rows = True
        (tmp_path / "train.jsonl").write_text(f"{GOOD}{BAD[name][0]}\n{GOOD}" * 3 + GOOD * 9)
        whole = list(blocks_of(tmp_path, args))
        assert whole[-1][1].left_out == 3
        assert sum(int((block[2, :-1] > 0).sum()) for block, _ in whole) == 4 * 15
        for stopped in range(1, len(whole)):
            assert equal(blocks_of(tmp_path, args, whole[stopped - 1][1]), whole[stopped:])

    def test_a_text_file_that_is_not_utf_8_is_named(self, tmp_path, args):
        (tmp_path / "a.txt").write_text("w1 w2 w3")
        (tmp_path / "b.txt").write_bytes(b"w1 caf\xe9")
        with pytest.raises(ValueError, match=r"b\.txt: .*utf-8.*position 6"):
            list(blocks_of(tmp_path, args))

    def test_a_row_of_another_file_is_named_by_its_number(self, tmp_path, args):
        Dataset.from_dict({"text": ["w1", None, "w2"]}).to_parquet(tmp_path / "train.parquet")
        with pytest.raises(ValueError, match=r"train\.parquet, row 2: has no text in text: None"):
            list(blocks_of(tmp_path / "train.parquet", args))

    def test_empty_documents_are_passed_over(self, tmp_path, args):
        (tmp_path / "train.jsonl").write_text('{"text": ""}\n\n{"text": " \\n"}\n' + GOOD)
        ((first, position),) = blocks_of(tmp_path / "train.jsonl", args)
        assert first[0, :4].tolist() == [11, 12, 13, END] and position.left_out == 0


def test_a_data_set_without_text_ends_with_65(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(SystemExit, match="65"):
        recipe.load_data(arguments("--dataset_name", str(tmp_path / "train.jsonl")), Tokenizer())
    assert "no text in any document" in capsys.readouterr().err


def test_what_is_known_of_files_tells_whether_they_are_others(tmp_path, args):
    path = tmp_path / "train.jsonl"
    path.write_text(GOOD)
    before = opened(path, args).fingerprint
    assert opened(path, args).fingerprint == before
    path.write_text(GOOD * 2)
    assert opened(path, args).fingerprint != before
