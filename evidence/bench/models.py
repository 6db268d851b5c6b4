# SPDX-License-Identifier: Apache-2.0
"""The models that are benchmarked, as arguments of the script that makes a tiny model."""

from typing import Any

Shape = dict[str, Any]

# The vocabulary is 32 times as large as the hidden state, as in Llama 3.
MEDIUM = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}
NEAR_ZERO = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 320,
}
ONE_AND_A_HALF_M = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}
SEVEN_M = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
TWENTY_M = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 12288,
    "max_position_embeddings": 2048,
}

# Shapes of Llama 3, with its vocabulary; their weights are written in bfloat16.
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
LLAMA_3B = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}

MODELS: dict[str, Shape] = {
    "medium": MEDIUM,
    "near zero": NEAR_ZERO,
    "1.5M": ONE_AND_A_HALF_M,
    "7M": SEVEN_M,
    "20M": TWENTY_M,
    "1B": LLAMA_1B,
    "3B": LLAMA_3B,
    "8B": LLAMA_8B,
}
FOR_A_GPU = ("1B", "3B", "8B")

# What --smoke changes in each model
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
}


def shape_of(name: str, smoke: bool) -> Shape:
    """Return the shape of a model by its name, small if `smoke`."""
    if smoke:
        return MODELS[name] | SMALL
    return MODELS[name]
