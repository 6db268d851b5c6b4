# SPDX-License-Identifier: Apache-2.0
"""Every recipe, with what its tiny models and its jobs have of their own: the one list of recipes.

Tests, the net (tests/net.py) and evidence/ find here what they run.
"""

from dataclasses import dataclass

# Matrices of wide models have at least 320 x 320 elements, since ZeRO-3 does not shard tensors
# below 100,000 elements.
WIDE = "--hidden_size 320 --intermediate_size 640 --num_attention_heads 5 "
WIDE += "--num_train_rows 210 --num_test_rows 21"
NARROW = "--hidden_size 128 --intermediate_size 256 --num_attention_heads 8 "
NARROW += "--num_train_rows 42 --num_test_rows 12"


@dataclass(frozen=True)
class Recipe:
    """What a recipe has beside what all have. Words are those of a command line.

    Attributes:
        wide: words of make_tiny.py for its wide model.
        narrow: the same for its model in the net.
        flags: words of the recipe in every job.
        adapters: the same beside adapters.
        shown: the number that its quickstart shows, if it has one, and what it must be after
            training: at least this, and for perplexity at most this.
    """

    wide: str = ""
    narrow: str = ""
    flags: str = ""
    adapters: str = ""
    shown: tuple[str, float] | None = None


# At the job's own learning rate, rounding errors grow from step to step in some of them: T5 does
# not scale its attention by its width, random BERTs and ViTs oscillate, and so do new rewards
SLOW = "--learning_rate 1e-4"
RECIPES = {
    "llama": Recipe(shown=("exact_match", 0.9)),
    "llama_dpo": Recipe(shown=("exact_match", 0.6)),
    "llama_reward": Recipe(flags="--learning_rate 3e-5", shown=("eval_accuracy", 0.9)),
    "llama_distill": Recipe(shown=("exact_match", 0.6)),
    # Of answers that are all equally long the first loss would be 0 but for rounding
    "llama_grpo": Recipe(
        flags="--num_generations 4 --max_completion_length 32 --num_iterations 2 --beta 0.1 "
        "--save_steps 4",
        shown=("exact_match", 0.8),
    ),
    "mistral_pretrain": Recipe(
        narrow="--full_attention",
        flags="--max_length 80 --max_eval_tokens 640",  # a block is longer than the model's window
        shown=("eval_perplexity", 4.0),
    ),
    "mixtral": Recipe(
        wide="--intermediate_size 128",
        adapters="--lora_r 128",  # large enough for ZeRO-3 to shard them
        shown=("exact_match", 0.7),
    ),
    # Under ZeRO-3 each token that T5 generates gathers all layers
    "t5": Recipe(
        flags="--learning_rate 3e-4 --generation_max_length 16", shown=("eval_bleu", 80.0)
    ),
    "bert": Recipe(flags=SLOW, shown=("eval_accuracy", 0.85)),
    "bert_ner": Recipe(flags=SLOW, shown=("eval_f1", 0.85)),
    # They grow faster still in a loss of cosines times 20
    "embeddings": Recipe(flags="--learning_rate 3e-5", shown=("eval_recall@10", 0.9)),
    "vlm": Recipe(shown=("exact_match", 0.9)),
    "vit": Recipe(flags=SLOW, shown=("eval_accuracy", 0.85)),
}
OTHERS = [name for name in RECIPES if name != "llama"]
# It has the model, the rows and the figures of another recipe
SAME_AS = {"llama_pipeline": "llama"}


def wide(recipe):
    """The words of make_tiny.py behind the folder, for a wide model."""
    return f"{WIDE} {RECIPES[recipe].wide}".split()


def narrow(recipe):
    """The words of make_tiny.py behind the folder, for the model of the net."""
    return f"{NARROW} {RECIPES[recipe].narrow}".split()


def flags_of(recipe):
    """The words that a recipe has in every job."""
    return RECIPES[SAME_AS.get(recipe, recipe)].flags.split()


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
