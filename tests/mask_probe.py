# SPDX-License-Identifier: Apache-2.0
"""Probe of attention masks: on which tokens do the logits of a document depend?

It compares only logits, so it works for every architecture, attention implementation and way to
make a batch. A batch is what the model is called with; `owners` has the shape of its input_ids and
says to which document each token belongs.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from core.batches import ends_of_rows

PADDING = -1  # the owner of tokens that belong to no document
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),  # shorter than the documents below
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),  # it also normalizes queries and keys
}


@torch.no_grad()
def leak(model, batch, owners):
    """Largest change of a document's logits when tokens of another, or the padding, are replaced.

    Exactly 0 where the mask is right: what is masked has weight 0, in any precision.
    """
    ids = batch["input_ids"]
    logits = model(**batch).logits
    changes = []
    for owner in owners.unique():
        is_own = owners == owner
        replaced = torch.where(is_own, (ids + 1) % model.config.vocab_size, ids)
        logits_then = model(**batch | {"input_ids": replaced}).logits
        change = (logits_then - logits).abs().amax(-1)  # one change per token
        of_others = change.masked_fill(is_own | (owners == PADDING), 0)
        changes.append(of_others.max())
    return torch.stack(changes).max().item()


@torch.no_grad()
def distance_from_alone(model, batch, owners):
    """Largest difference between a document's logits in the batch and in a batch of its own."""
    ids = batch["input_ids"]
    logits = model(**batch).logits
    distances = []
    for owner in owners.unique():
        if owner == PADDING:
            continue
        own = owners == owner
        ends = ends_of_rows([int(own.sum())]) if "cu_seq_lens_q" in batch else {}
        alone = model(input_ids=ids[own][None], use_cache=False, **ends).logits[0]
        distances.append((logits[own] - alone).abs().max())
    return torch.stack(distances).max().item()


def random_model(architecture, attention, dtype=torch.float32, device="cpu"):
    """A model with random weights, the same in each call."""
    torch.manual_seed(0)
    config = copy.deepcopy(ARCHITECTURES[architecture])  # which keeps its model's attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.to(device).eval()


def packed_batch(*rows, device="cpu"):
    """(batch, owners) of random documents, given by their lengths, packed into rows of one length.

    Positions start from 0 in each document, and there is neither an attention mask nor a cache:
    only then does transformers keep documents apart.
    """
    lengths = [length for row in rows for length in row]
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(len(rows), -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(len(rows), -1)
    ids = torch.randint(
        SHAPE["vocab_size"], owners.shape, generator=torch.Generator().manual_seed(0)
    )
    batch = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False}
    return batch, owners.to(device)
