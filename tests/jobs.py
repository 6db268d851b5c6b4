# SPDX-License-Identifier: Apache-2.0
"""The tiny model and rows of each recipe, as arguments of make_tiny.py and of the recipe."""

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


def data_of(tiny):
    """The arguments that name a tiny model and its rows, in files or folders of images."""
    arguments = ["--model_name_or_path", tiny / "model"]
    for flag, split in (("--dataset_name", "train"), ("--eval_dataset_name", "test")):
        rows = tiny / "data" / f"{split}.jsonl"
        arguments += [flag, rows if rows.exists() else rows.with_suffix("")]
    return arguments
