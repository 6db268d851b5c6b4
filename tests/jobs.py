# SPDX-License-Identifier: Apache-2.0
"""The tiny model and rows of each recipe, as arguments of make_tiny.py, wide enough for ZeRO-3."""

# Matrices have at least 320 x 320 elements, since ZeRO-3 does not shard tensors below 100,000
# elements.
WIDTH = "--hidden_size 320 --intermediate_size 640 --num_attention_heads 5".split()
ROWS = "--num_train_rows 210 --num_test_rows 21".split()
MODEL = [*WIDTH, "--num_key_value_heads", "5", *ROWS]
EXPERTS = "--num_local_experts 4 --intermediate_size 128".split()
MAKERS = {
    "llama": ["llama", *MODEL],
    "llama_dpo": ["llama_dpo", *MODEL],
    "mistral_pretrain": ["mistral_pretrain", *MODEL],
    "mixtral": ["mixtral", *MODEL, *EXPERTS],
    "t5": ["t5", *WIDTH, *ROWS],
    "bert": ["bert", *WIDTH, *ROWS],
    "bert_ner": ["bert_ner", *WIDTH, *ROWS],
    "vit": ["vit", *WIDTH, *ROWS],
}

# Llama-3.1-8B, whose shape is planned without its weights
LLAMA_3_1_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
