# SPDX-License-Identifier: Apache-2.0
"""The loss that a model computes by itself, with nothing but transformers and peft.

Nothing here computes as recipes/ do: the labels come from the chat template's own mask of what the
assistant says, the rows are padded with an attention mask, and the model gets labels and returns
its loss.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from components import upstream

NOT_TRAINED_ON = -100


def read_batch(rows: Path, model_folder: Path) -> dict[str, torch.Tensor]:
    """Return the rows as one padded batch: input_ids, attention_mask and labels, [rows, tokens]."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
    conversations = [conversation_of(json.loads(line)) for line in rows.read_text().splitlines()]
    encoded = tokenizer.apply_chat_template(
        conversations,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="pt",
        padding=True,
    )
    labels = encoded["input_ids"].masked_fill(encoded["assistant_masks"] == 0, NOT_TRAINED_ON)
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "labels": labels,
    }


def conversation_of(row: dict[str, str]) -> list[dict[str, str]]:
    """Return a prompt and its completion as a conversation."""
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]


def load(folder: Path, base: Path | None = None) -> Any:
    """Return the model of a folder, or the adapters of a folder on their base, in fp32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        base or folder, dtype=torch.float32, trust_remote_code=False
    )
    if base is None:
        return model
    upstream.silence_missing_cpu_kernel()
    from peft import PeftModel  # takes seconds to import

    return PeftModel.from_pretrained(model, folder)


@torch.no_grad()
def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Return the model's own loss of a batch: the mean over its trained tokens, in nats.

    It is computed in training mode, as a step of training does.
    """
    model.train()
    return model(**batch, use_cache=False).loss.item()


def effect_of_adapters(model: Any) -> dict[str, bool]:
    """Return for the name of each layer with an adapter whether the adapter has an effect.

    LoRA's second matrix begins with zeros. As long as it is zero, nothing was trained.
    """
    effects = {}
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            layer = name.split(".lora_B.")[0].removeprefix("base_model.model.")
            effects[layer] = bool(weight.any())
    return effects
