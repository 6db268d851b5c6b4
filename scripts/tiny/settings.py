# SPDX-License-Identifier: Apache-2.0
"""Settings that the configurations of several models share."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from tiny.options import LlamaOptions, MistralPretrainOptions


def initializer_range(hidden_size: int) -> float:
    """Return the standard deviation of the random weights.

    The usual 0.02 suits widths of hundreds and thousands; a narrow model learns much faster from
    larger weights.
    """
    return 0.7 * hidden_size**-0.5


def decoder_settings(
    tokenizer: PreTrainedTokenizerFast, options: LlamaOptions | MistralPretrainOptions
) -> dict[str, Any]:
    """Return the settings that a Llama, a Mixtral and a Mistral share."""
    settings: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.num_hidden_layers,
        "num_attention_heads": options.num_attention_heads,
        "num_key_value_heads": options.num_key_value_heads or options.num_attention_heads,
        "intermediate_size": options.intermediate_size,
        "max_position_embeddings": options.max_position_embeddings,
    }
    settings["bos_token_id"] = tokenizer.bos_token_id
    settings["eos_token_id"] = tokenizer.eos_token_id
    settings["pad_token_id"] = tokenizer.pad_token_id
    settings["initializer_range"] = initializer_range(options.hidden_size)
    return settings
