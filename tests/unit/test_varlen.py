"""`--attn_implementation varlen`: rows in one line give what each row gives alone.

The kernel runs on GPUs alone (tests/gpu/test_masks_on_gpu.py). Here a plain function with its arguments stands in for
it, so that registration, shapes, grouped heads, windows and the ends of rows are shown; what the real one takes is
looked at on tensors without memory.
"""

import sys

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

import llama
import varlen
from mask_probe import ARCHITECTURES, SHAPE, distance_from_alone, leak, packed_batch, random_model

LENGTHS = [7, 1, 10, 6]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32, added in another order


def by_row(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """What torch documents of varlen_attn, row by row: [tokens, heads, head_dim]."""
    assert (
        query.dim() == 3
        and cu_seq_q.dtype == torch.int32
        and cu_seq_q.equal(cu_seq_k)
        and max_q == max_k
    )
    assert int(cu_seq_q.diff().max()) == max_q and int(cu_seq_q[-1]) == len(query) == len(
        key
    ) == len(value)
    assert query.shape[1] == key.shape[1] or enable_gqa
    rows, ends = [], cu_seq_q.tolist()
    left, right = window_size
    for start, end in zip(ends, ends[1:], strict=False):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance <= (left if left >= 0 else end)) & (
            distance >= -(right if right >= 0 else end)
        )
        parts = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        row = scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.fixture
def calls(monkeypatch):
    """The stand-in instead of the kernel; the dtypes of its queries, keys and values."""
    seen = []

    def watched(query, key, value, *arguments, **options):
        seen.append((query.dtype, key.dtype, value.dtype))
        return by_row(query, key, value, *arguments, **options)

    # components/varlen.py registers its own under the same name
    known = AttentionInterface._global_mapping
    monkeypatch.setitem(known, varlen.NAME, varlen.varlen_attention)
    monkeypatch.setattr(varlen, "varlen_attn", watched)
    monkeypatch.setattr(varlen, "PARAMETERS", frozenset({"window_size", "enable_gqa"}))
    return seen


def in_one_line(*lengths):
    """(batch, owners) of random rows of these lengths, with their ends."""
    batch, owners = packed_batch(list(lengths))
    return batch | llama.ends_of_rows(lengths), owners


def pair_of(architecture):
    """The same model with this attention and with sdpa."""
    ours, theirs = (random_model(architecture, kind) for kind in ("varlen", "sdpa"))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("groups", [True, False], ids=["grouped", "repeated"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_gradients_are_those_of_each_row_alone(architecture, groups, calls, monkeypatch):
    if not groups:
        monkeypatch.setattr(varlen, "PARAMETERS", frozenset({"window_size"}))
    ours, theirs = pair_of(architecture)
    batch, owners = in_one_line(*LENGTHS)
    logits = ours(**batch).logits[0]
    alone = [
        theirs(input_ids=batch["input_ids"][owners == row][None], use_cache=False).logits[0]
        for row in range(4)
    ]
    torch.testing.assert_close(logits, torch.cat(alone), **CLOSE)
    assert len(calls) == 2  # once a layer
    assert leak(ours, batch, owners) == 0 and distance_from_alone(ours, batch, owners) < 1e-6
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    (torch.cat(alone) * weights).sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_nothing_is_read_to_find_out_whether_rows_are_packed(calls, monkeypatch):
    """With the other attentions transformers looks at the positions, for which the host waits for the device."""
    asked = []
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", asked.append)
    batch, _ = in_one_line(*LENGTHS)
    ours, theirs = pair_of("mistral")
    ours(**batch)
    assert calls and not asked
    theirs(**batch)
    assert asked


def test_wrong_ends_are_seen(calls):
    ours, _ = pair_of("llama")
    batch, owners = in_one_line(*LENGTHS)
    assert leak(ours, batch | llama.ends_of_rows([24]), owners) > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_recipes_loss_is_that_of_padded_rows(checkpointing, calls):
    chance = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(LENGTHS, 1):
        ids = torch.randint(1, 320, (length,), generator=chance).tolist()
        rows.append({"input_ids": ids, "labels": [-100] + ids[1:], "row": number})
    source, lines, found = Dataset.from_list(rows).with_format("numpy"), [[0], [1], [2], [3]], []
    for model, options in zip(pair_of("llama"), ({"varlen": True}, {}), strict=True):
        model.train()
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
                {"use_reentrant": False}
            )
        llama.loss_in_head(model, 256)
        loss = llama.summed_loss(model, llama.collate(source, lines, 0, **options))
        loss.backward()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        found.append((loss.item(), norm.item()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(calls) == 2 * (1 + checkpointing)


def test_under_autocast_the_kernel_gets_what_it_takes(calls):
    """Rotary positions and Qwen's norms leave queries and keys in fp32."""
    ours, _ = pair_of("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        ours(**in_one_line(*LENGTHS)[0]).logits.sum().backward()
    assert set(calls) == {(torch.bfloat16,) * 3}


def test_without_the_ends_nothing_is_computed(calls):
    ours, _ = pair_of("llama")
    batch, _ = packed_batch(LENGTHS)
    with pytest.raises(ValueError, match="needs all rows in one line, with cu_seq_lens_q"):
        ours(**batch)


IMPOSSIBLE = {
    "softcap": 50.0,
    "s_aux": torch.zeros(4),
    "dropout": 0.1,
    "is_causal": False,
    "position_bias": torch.zeros(1),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_the_kernel_cannot_do_is_an_error(name, calls):
    query, ends = torch.zeros(1, 4, 3, 16), llama.ends_of_rows([3])
    with pytest.raises(ValueError, match=name):
        varlen.varlen_attention(
            torch.nn.Module(), query, query, query, None, **ends, **{name: IMPOSSIBLE[name]}
        )
    assert not calls


@pytest.mark.skipif(not varlen.is_available(), reason="this torch has no varlen_attn")
def test_the_real_kernel_takes_these_shapes():
    """Forward and backward pass on tensors without memory: arguments and shapes, not numbers."""
    model = random_model("mistral", "varlen", torch.bfloat16).to("meta")
    batch, _ = in_one_line(*LENGTHS)
    batch = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    logits = model(**batch).logits
    assert logits.shape == (1, 24, 320) and logits.dtype == torch.bfloat16
    logits.sum().backward()
    assert all(weight.grad.shape == weight.shape for weight in model.parameters())


MODELS = {
    "llama": (LlamaConfig(**SHAPE), None),
    "mistral": (MistralConfig(**SHAPE), None),
    "qwen3": (Qwen3Config(**SHAPE), None),
    "mixtral": (MixtralConfig(**SHAPE, num_local_experts=2), None),
    "gemma2": (Gemma2Config(**SHAPE), "its attention takes softcap"),
    "gpt_oss": (
        GptOssConfig(
            **SHAPE, num_local_experts=2, layer_types=["sliding_attention", "full_attention"]
        ),
        "its attention takes s_aux",
    ),
    "llama4": (
        Llama4TextConfig(**SHAPE, num_local_experts=2),
        "it has layers of chunked_attention",
    ),
    "qwen3_next": (Qwen3NextConfig(), "it has layers of linear_attention"),
    "gpt2": (GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=320), "attn_pdrop 0.1"),
    "gpt_neo": (
        GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]]),
        "do not tell their attention",
    ),
    "dropout": (LlamaConfig(**SHAPE, attention_dropout=0.1), "attention_dropout 0.1"),
    "small heads": (LlamaConfig(**SHAPE | {"head_dim": 20}), "20 features"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_for_which_it_would_be_wrong_are_named(name):
    config, says = MODELS[name]
    with torch.device("meta"):
        problem = varlen.problem_of(AutoModelForCausalLM.from_config(config))
    assert problem is None if says is None else says in problem


def test_alone_the_recipe_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--attn_implementation", "varlen"])
    monkeypatch.setattr(llama, "run_status", None)
    with pytest.raises(SystemExit, match="64"):
        llama.parse_args()
    assert "needs preflight.py, varlen.py" in capsys.readouterr().err
