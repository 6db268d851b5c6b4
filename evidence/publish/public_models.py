# SPDX-License-Identifier: Apache-2.0
"""The shapes of public models, so that examples are planned and tested without the hub.

Each entry has those fields of https://huggingface.co/MODEL/blob/main/config.json that decide the
shapes of the tensors and how long a row may be.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
SMOLLM = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192}

SMOLLM2_135M = SMOLLM | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SMOLLM2_1_7B = SMOLLM | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": True,
}
LLAMA_3_2_1B = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
LLAMA_3_1_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_0_6B = QWEN | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN3_8B = QWEN | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-1.7B": SMOLLM2_1_7B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_3_2_1B,
    "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B,
    "Qwen/Qwen3-0.6B-Base": QWEN3_0_6B,
    "Qwen/Qwen3-8B": QWEN3_8B,
}


def config_of(model: str) -> PretrainedConfig:
    """Return a config of a public model's shapes. Raises ValueError for a model without an entry.

    model: its hub id.
    """
    if model not in SHAPES:
        raise ValueError(f"{model}: has no entry in evidence/publish/public_models.py")
    fields: dict[str, Any] = dict(SHAPES[model])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
