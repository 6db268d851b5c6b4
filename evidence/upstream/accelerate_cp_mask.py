# SPDX-License-Identifier: Apache-2.0
"""accelerate: context parallelism drops the masks of left padding and of packed documents.

The hooks that `prepare` attaches to a model do it; they need no ranks to be shown.
"""

import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.arange(16)[None]
LEFT_PADDING = {
    "attention_mask": torch.tensor([[0] * 8 + [1] * 8]),
    "position_ids": torch.tensor([[0] * 8 + list(range(8))]),
}
PACKING = {"position_ids": torch.tensor([2 * list(range(8))])}
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 1, "initializer_range": 0.5}
model = LlamaForCausalLM(LlamaConfig(**sizes))


def last_logit(batch: dict) -> str:
    return f"{model(IDS, **batch, use_cache=False).logits[0, -1, 0]:.4f}"


CASES = {"left padding": LEFT_PADDING, "packed documents": PACKING}
expected = {name: last_logit(batch) for name, batch in CASES.items()}
_attach_context_parallel_hooks(model)
for name, batch in CASES.items():
    try:
        got = last_logit(batch)
    except ValueError:
        got = "ValueError"
    print(f"expected, {name}: {expected[name]} or ValueError\ngot, {name}: {got}")
