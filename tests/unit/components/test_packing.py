"""Rows become batches, and batches a loss, without a token lost, doubled, or learnt from another row.

In process, on random numbers and tiny random models in fp32.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig

import llama
from components.batches import best_fit, global_batches
from components.cli import may_change, parse_arguments
from components.head_loss import LossInHead, logits_mib
from components.packing import TokenCollator, takes_one_line

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=320,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
    "gemma2, which caps its logits": Gemma2Config(
        **SHAPE, final_logit_softcapping=2.0, sliding_window=16
    ),
}
CPU = torch.device("cpu")
LAYOUTS = {"padded": {}, "packed": {"width": 64}, "padding free": {"refit": True}}


def lengths_of(kind, number=3000):
    chance = np.random.default_rng(0)
    return {
        "ragged": chance.integers(1, 513, number),
        "short": chance.integers(1, 60, number),
        "long": chance.integers(400, 513, number),
        "equal": np.full(number, 171),
        "one": np.array([7]),
    }[kind]


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
    return best_fit([len(ids) for ids in rows["input_ids"]], 64)


def collate(rows, lines, pad_token_id=0, **options):
    return TokenCollator(pad_token_id=pad_token_id, **options)(rows, lines)


def model_of(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        MODELS[name], attn_implementation="eager", dtype=torch.float32
    )


def plain_loss(model, rows):
    """Loss summed over the rows one by one, by transformers' own forward pass, and the gradient's norm."""
    total = 0
    for row in rows.with_format(None):
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum"
        )
    return total.item(), norm_after(total, model)


def norm_after(loss, model):
    model.zero_grad()
    loss.backward()
    return torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()]).item()


@pytest.mark.parametrize("kind", ["ragged", "short", "long", "equal", "one"])
def test_each_row_is_packed_once_and_next_to_nothing_stays_empty(kind):
    lengths = lengths_of(kind)
    lines = best_fit(lengths, 512)
    assert Counter(row for line in lines for row in line) == Counter(range(len(lengths)))
    sums = np.array([lengths[line].sum() for line in lines])
    assert sums.max() <= 512
    least = {"long": len(lengths), "equal": np.ceil(len(lengths) / 2)}.get(
        kind, np.ceil(lengths.sum() / 512)
    )
    assert len(lines) <= 11 / 9 * least + 1  # what best-fit decreasing guarantees (Johnson 1974)
    if kind in ("ragged", "short"):
        assert lengths.sum() / (512 * len(lines)) > 0.97


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_learnt_token_of_every_row_is_learnt_once(layout, rows):
    batch = collate(rows, lines_of(rows, layout), **LAYOUTS[layout])
    ids = batch["inputs"]["input_ids"].flatten()
    positions, targets = batch["positions"], batch["targets"]
    wanted = Counter(
        (row["input_ids"][i - 1], row["input_ids"][i])
        for row in rows.with_format(None)
        for i in range(1, len(row["labels"]))
        if row["labels"][i] != -100
    )
    assert Counter(zip(ids[positions].tolist(), targets.tolist(), strict=True)) == wanted
    assert batch["counts"].tolist() == [wanted.total(), sum(len(ids) for ids in rows["input_ids"])]
    assert sorted(batch["row"]) == list(range(1, 41))


def test_a_flat_batch_tells_flash_attention_where_rows_end(rows):
    batch = collate(rows, lines_of(rows, "packed"), width=64, one_line=True)
    inputs = batch["inputs"]
    lengths = [len(ids) for line in lines_of(rows, "packed") for ids in rows[line]["input_ids"]]
    assert inputs["input_ids"].shape == (1, sum(lengths)) and inputs["max_length_q"] == max(lengths)
    assert (
        inputs["cu_seq_lens_q"].dtype == torch.int32
        and inputs["cu_seq_lens_q"].diff().tolist() == lengths
    )
    assert (inputs["position_ids"] == 0).sum() == len(lengths)


@pytest.mark.parametrize(
    "flags", [[], ["--packing"], ["--padding_free"]], ids=["plain", "packed", "free"]
)
@pytest.mark.parametrize(
    ("kernel", "in_one_line"),
    [("sdpa", False), ("flash_attention_2", True), ("kernels-community/flash-attn2", True)],
)
def test_every_flash_run_is_free_of_padding(kernel, in_one_line, flags):
    """Else each layer would read from the positions, and wait for the device, whether rows are packed."""
    words = ["--attn_implementation", kernel, *flags]
    args = parse_arguments(llama.Arguments, words=words)
    assert takes_one_line(args.attn_implementation) == in_one_line


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_loss_of_rows_in_one_line_is_that_of_padded_ones(layout, rows):
    model = model_of("llama")
    token_loss = LossInHead(model, 256, CPU)
    padded = collate(rows, lines_of(rows, "padded"))
    flat = collate(rows, lines_of(rows, layout), width=64, one_line=True)
    assert len(flat["inputs"]["input_ids"]) == 1 and flat["counts"].equal(padded["counts"])
    assert sorted(flat["row"]) == sorted(padded["row"])
    losses = [
        token_loss(model, batch) for batch in (padded, flat)
    ]  # eager attention: by the positions
    norms = [norm_after(loss, model) for loss in losses]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_how_many_logits_are_held_at_a_time_may_change_in_a_run_that_resumes():
    assert "max_logits_mib" in may_change(llama.Arguments)
    device = torch.device("cuda:0")
    args = parse_arguments(llama.Arguments, words=["--max_logits_mib", "7"])
    assert logits_mib(args.max_logits_mib, device) == 7


def test_padding_free_batches_have_fewer_and_no_longer_lines(rows):
    padded, free = (collate(rows, lines_of(rows, "padded"), refit=refit) for refit in (False, True))
    assert free["inputs"]["input_ids"].shape[1] == padded["inputs"]["input_ids"].shape[1]
    assert len(free["inputs"]["input_ids"]) < 0.7 * len(padded["inputs"]["input_ids"])
    assert free["counts"].equal(padded["counts"])


def test_a_rank_without_rows_gets_one_token_that_is_not_learnt(rows):
    batch = collate(rows, [], 3)
    assert batch["inputs"]["input_ids"].tolist() == [[3]] and batch["counts"][0] == 0


def test_rows_of_one_length_come_together_and_each_comes_once():
    lengths, size, window = lengths_of("ragged", 1000), 4, 6
    batches = global_batches(1000, size, window, 2, seed=0, lengths=lengths)
    assert Counter(row for batch in batches for row in batch) == Counter(
        {row: 2 for row in range(1000)}
    )
    fill = [
        lengths[batch].sum() / (len(batch) * lengths[batch].max()) for batch in batches if batch
    ]
    assert np.mean(fill) > 0.97
    windows = [sum(batches[start : start + window], []) for start in range(0, len(batches), window)]
    assert batches == global_batches(1000, size, window, 2, seed=0, lengths=lengths)
    shuffled = global_batches(1000, size, window, 2, seed=0)
    assert len(windows) == len(shuffled) // window


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_rows_one_by_one(name, layout, rows):
    model = model_of(name)
    loss, norm = plain_loss(model, rows)
    batch = collate(rows, lines_of(rows, layout), **LAYOUTS[layout])
    for mib in (256, 0.02):  # at once, and in pieces of 16 tokens
        copied = model_of(name)
        token_loss = LossInHead(copied, mib, CPU)
        ours = token_loss(copied, batch)
        assert ("after its head" in str(token_loss)) == name.startswith("gemma2")
        assert ours.item() == pytest.approx(loss, rel=1e-6)
        assert norm_after(ours, copied) == pytest.approx(norm, rel=1e-5)
