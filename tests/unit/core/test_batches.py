# SPDX-License-Identifier: Apache-2.0
"""Batches cover every row once in each epoch, however they are cut, packed and laid out, without a
token lost, doubled, or trained on from another row.
"""

from bisect import bisect_left, insort
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from core.batches import Plan, TokenCollator, pack
from core.loss import LossInHead
from example_arguments import language_model_arguments
from extras.pipeline.layout import PipelineLayout
from fakes import fake_accelerator, rows_of_their_own

CPU = torch.device("cpu")
WIDTH = 64
LAYOUTS = {"padded": {}, "packed": {"width": WIDTH}, "padding free": {"refit": True}}


@pytest.fixture(scope="module")
def rows():
    """40 random rows, the first part of each a prompt."""
    chance = np.random.default_rng(0)
    rows = []
    for number in range(40):
        length = int(chance.integers(4, 40))
        ids, prompt = chance.integers(1, 320, length).tolist(), int(chance.integers(0, length - 1))
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "row": number + 1})
    return Dataset.from_list(rows).with_format("numpy")


def lines_of(rows, layout):
    if layout != "packed":
        return [[number] for number in range(len(rows))]
    return pack([len(ids) for ids in rows["input_ids"]], WIDTH)


def collate(rows, lines, pad_token_id=0, **options):
    return TokenCollator(pad_token_id=pad_token_id, **options)(rows, lines)


# ---- Which rows form which batch ----
def plan_of(flags, num_rows, layout=None, lengths=None):
    args = language_model_arguments(*flags.split())
    return Plan(args, layout or rows_of_their_own(), num_rows, lengths)


def steps_of(flags, num_rows, ranks=1, accumulation=1, first_step=0, lengths=None):
    """The rows of each step, over all ranks."""
    flags += f" --gradient_accumulation_steps {accumulation}"
    of_ranks = []
    for rank in range(ranks):
        plan = plan_of(flags, num_rows, rows_of_their_own(ranks, rank), lengths)
        batches = list(plan.training_batches(first_step))
        windows = range(0, len(batches), accumulation)
        of_ranks.append([sum(batches[i : i + accumulation], []) for i in windows])
    return [sum(parts, []) for parts in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("num_rows", [1, 11, 12, 13, 210])
@pytest.mark.parametrize(
    ("size", "accumulation", "ranks"), [(12, 1, 1), (3, 4, 1), (3, 2, 2), (1, 3, 4)]
)
def test_an_epoch_has_every_row_once_in_the_same_steps_however_it_is_cut(
    num_rows, size, accumulation, ranks
):
    flags = "--num_train_epochs 2 --per_device_train_batch_size "
    steps = steps_of(f"{flags}{size}", num_rows, ranks, accumulation)
    half = len(steps) // 2
    assert sorted(sum(steps[:half], [])) == sorted(sum(steps[half:], [])) == list(range(num_rows))
    whole = steps_of(f"{flags}12", num_rows)
    assert [sorted(step) for step in steps] == [sorted(step) for step in whole]
    assert all(steps)  # no step without rows
    assert steps_of(f"{flags}{size}", num_rows, ranks, accumulation, first_step=1) == steps[1:]


def test_the_order_is_numpys_permutation_for_seed_and_epoch():
    """What the checkpoints of every version say of at most 2**20 rows."""
    plan = plan_of("--seed 7", 24)
    for epoch in range(3):
        permutation = np.random.default_rng((7, epoch)).permutation(24)
        assert plan.order_of(epoch).tolist() == permutation.tolist()


def test_rows_of_one_length_come_together_and_each_comes_once():
    lengths = np.random.default_rng(0).integers(1, 513, 1000)
    flags = "--train_sampling_strategy group_by_length --per_device_train_batch_size 4"
    plan = plan_of(f"{flags} --num_train_epochs 2", 1000, rows_of_their_own(6), lengths)
    for epoch in range(2):
        order = plan.order_of(epoch)
        assert sorted(order.tolist()) == list(range(1000))
        filled = lengths[order].reshape(-1, 4)
        assert np.mean(filled.sum(1) / (4 * filled.max(1))) > 0.97


def test_the_ranks_of_a_pipeline_get_the_same_batches_and_pipelines_get_others():
    """Here ranks 0 and 2 are one pipeline, and ranks 1 and 3 are another."""
    flags = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3"
    found = []
    for rank in range(4):
        accelerator = fake_accelerator(num_processes=4, process_index=rank)
        layout = PipelineLayout(accelerator, {"pp": 2})
        found.append(list(plan_of(flags, 24, layout).training_batches(0)))
    assert found[0] == found[2] and found[1] == found[3]
    assert sorted(sum(found[0] + found[1], [])) == list(range(24))


def test_each_pass_over_a_loader_has_every_row_to_evaluate_on_once():
    rows = SimpleNamespace(dataset=Dataset.from_dict({"row": range(23)}))

    def collate(source, lines):
        return {"row": [number for line in lines for number in line]}

    collate.columns = ["row"]
    loaders = []
    for rank in range(3):
        args = SimpleNamespace(per_device_eval_batch_size=4, dataloader_num_workers=0)
        plan = Plan(args, rows_of_their_own(3, rank), 99)
        loaders.append(plan.ordered_loader(rows, collate, range(5, 23)))
    for _ in range(2):
        passes = [[batch["row"] for batch in loader] for loader in loaders]
        assert [len(batches) for batches in passes] == [2, 2, 2]
        assert passes[0] == [[5, 6, 7, 8], [17, 18, 19, 20]] and passes[2][1] == []
        assert sorted(sum(sum(passes, []), [])) == list(range(5, 23))


# ---- Packing ----
def place_row_by_row(lengths, capacity):
    """Best-fit decreasing as its paper describes it: one row after the other, into sorted rooms."""
    lines = []
    rooms = []  # (tokens left, number of the line)
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(rooms, (lengths[row], 0))
        if place < len(rooms):
            room, line = rooms.pop(place)
        else:
            room, line = capacity, len(lines)
            lines.append([])
        lines[line].append(row)
        insort(rooms, (room - lengths[row], line))
    return lines


def test_lines_are_those_of_placing_row_by_row():
    """Ties go to the earliest line: another one would change every loss."""
    chance = np.random.default_rng(0)
    for _ in range(100):
        capacity = int(chance.integers(1, 200))
        shortest = int(chance.integers(1, capacity + 1))
        lengths = chance.integers(shortest, capacity + 1, chance.integers(1, 400))
        assert pack(lengths, capacity) == place_row_by_row(lengths, capacity)


def test_next_to_nothing_of_a_line_stays_empty():
    lengths = np.random.default_rng(0).integers(1, 513, 3000).astype(np.uint16)
    lines = pack(lengths, 512)
    assert Counter(row for line in lines for row in line) == Counter(range(3000))
    assert max(lengths[line].sum() for line in lines) <= 512
    assert lengths.sum() / (512 * len(lines)) > 0.97


# ---- Batches of tokens ----
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_that_is_trained_on_is_there_once(layout, rows):
    batch = collate(rows, lines_of(rows, layout), **LAYOUTS[layout])
    ids = batch["inputs"]["input_ids"].flatten()
    found = zip(ids[batch["positions"]].tolist(), batch["targets"].tolist(), strict=True)
    wanted = Counter(
        (row["input_ids"][i - 1], row["input_ids"][i])
        for row in rows.with_format(None)
        for i in range(1, len(row["labels"]))
        if row["labels"][i] != -100
    )
    assert Counter(found) == wanted
    assert batch["counts"].tolist() == [wanted.total(), sum(len(ids) for ids in rows["input_ids"])]
    assert sorted(batch["row"]) == list(range(1, 41))


def test_padding_is_not_trained_on_where_its_token_ends_the_rows(rows):
    """Turns may end with the pad token; each of those ends is trained on."""
    two = rows.select(range(2))
    end = int(two[0]["input_ids"][-1])
    batch = collate(two, [[0], [1]], pad_token_id=end)
    labels = np.concatenate([row["labels"][1:] for row in two])
    assert batch["targets"].tolist() == labels[labels != -100].tolist()
    assert end in batch["targets"] and (batch["inputs"]["input_ids"][:, -1] == end).all()


def test_padding_free_batches_have_fewer_and_no_longer_lines(rows):
    padded, free = (collate(rows, lines_of(rows, "padded"), refit=refit) for refit in (False, True))
    assert free["inputs"]["input_ids"].shape[1] == padded["inputs"]["input_ids"].shape[1]
    assert len(free["inputs"]["input_ids"]) < 0.7 * len(padded["inputs"]["input_ids"])
    assert free["counts"].equal(padded["counts"])


@pytest.mark.parametrize("one_line", [False, True])
def test_a_rank_without_rows_gets_one_token_that_counts_nowhere(rows, one_line):
    batch = collate(rows, [], 3, one_line=one_line)
    assert batch["inputs"]["input_ids"].tolist() == [[3]]
    assert batch["counts"].tolist() == [0, 0] and batch["lengths"] == batch["row"] == []


# ---- In one line ----
def test_a_batch_in_one_line_tells_flash_attention_where_rows_end(rows):
    lines = lines_of(rows, "packed")
    inputs = collate(rows, lines, width=WIDTH, one_line=True)["inputs"]
    lengths = [len(ids) for line in lines for ids in rows[line]["input_ids"]]
    assert inputs["input_ids"].shape == (1, sum(lengths))
    assert inputs["max_length_q"] == max(lengths)
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["cu_seq_lens_q"].diff().tolist() == lengths
    assert (inputs["position_ids"] == 0).sum() == len(lengths)


# ---- The loss ----
def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def loss_and_norm(loss, model):
    model.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    return loss.item(), norm.item()


@pytest.fixture(scope="module")
def one_by_one(rows):
    """The loss summed over the rows one by one, by transformers' own forward pass, and the norm."""
    model = make_model()
    total = 0
    for row in rows.with_format(None):
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum"
        )
    return loss_and_norm(total, model)


@pytest.mark.parametrize(
    ("layout", "one_line"),
    [*((name, False) for name in LAYOUTS), ("padded", True), ("packed", True)],
)
def test_the_loss_is_that_of_the_rows_one_by_one(layout, one_line, rows, one_by_one):
    model = make_model()
    batch = collate(rows, lines_of(rows, layout), one_line=one_line, **LAYOUTS[layout])
    assert (len(batch["inputs"]["input_ids"]) == 1) == one_line
    loss, norm = loss_and_norm(LossInHead(model, 256, CPU)(model, batch), model)
    assert loss == pytest.approx(one_by_one[0], rel=1e-6)
    assert norm == pytest.approx(one_by_one[1], rel=1e-5)
