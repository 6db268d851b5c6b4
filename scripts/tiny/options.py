# SPDX-License-Identifier: Apache-2.0
"""The options of each maker.

Each field of a dataclass is a flag of the command, and the docstring is the maker's --help. Nothing
here imports torch, so that a wrong flag is refused at once. Sizes that do not fit together are
refused by transformers.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tiny import chat


def option(default: Any, help: str = "") -> Any:
    """Declare a field that is a flag of the command."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """What all makers have in common."""

    quiet: bool = option(False, "do not print a command that trains on what was made")


# ---- Models that read from left to right: Llama, Mixtral, Mistral ----


@dataclass(frozen=True)
class DecoderOptions(Options):
    """The shape of a tiny Llama, Mixtral or Mistral."""

    hidden_size: int = option(128, "a multiple of 64")
    num_hidden_layers: int = option(2)
    num_attention_heads: int = option(4)
    num_key_value_heads: int | None = option(None, "default: as many as --num_attention_heads")
    intermediate_size: int = option(384, "a multiple of 64")
    seed: int = option(0)


@dataclass(frozen=True)
class LlamaOptions(DecoderOptions):
    """A Llama with a chat template, and rows of seven skills.

    FOLDER/model is a random LlamaForCausalLM, with a tokenizer and a chat template. FOLDER/data
    holds train.jsonl and test.jsonl, rows of {"prompt", "completion", "skill"}. The skills are
    about made-up words and numbers, and the split is by word and by number: what a test prompt asks
    about is in no training prompt of any skill.

    With --text only the model is written. Its tokenizer is a BPE of --vocab_size tokens that is
    trained on every string in the file.
    """

    text: Path | None = option(
        None, ".txt or .jsonl file to train the tokenizer on; writes no data"
    )
    vocab_size: int = option(320, f"rows of the embedding, >= {chat.SMALLEST_VOCAB}")
    max_position_embeddings: int = option(512, "longest sequence, in tokens")
    tie_word_embeddings: bool = option(False, "one matrix for embedding and output")
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of the weights")
    device: Literal["cpu", "cuda"] = option("cpu", "where the weights are drawn")
    num_train_rows: int = option(18200)
    num_test_rows: int = option(700, "at most 1743")


@dataclass(frozen=True)
class MixtralOptions(LlamaOptions):
    """A Mixtral, and the rows of the llama maker.

    FOLDER/model is a random MixtralForCausalLM, with a tokenizer and a chat template. A token takes
    two of the --num_local_experts experts of each layer. FOLDER/data is that of the llama maker.
    """

    intermediate_size: int = option(192, "size of each expert; a multiple of 64")
    num_local_experts: int = option(4, "experts in each layer, at least 2")


@dataclass(frozen=True)
class LlamaDpoOptions(DecoderOptions):
    """A Llama, and pairs of a right and a wrong answer.

    FOLDER/model is that of the llama maker. FOLDER/data holds

        train.jsonl, test.jsonl   rows of {"prompt", "chosen", "rejected", "completion", "skill"},
                                  the first four are lists of messages; each skill has one typical
                                  mistake, such as a word that is not written in capitals, or the
                                  number before instead of the number after
        demonstrations.jsonl      rows of {"prompt", "completion", "skill"}; half of the
                                  completions are the mistake

    A model that is trained on the demonstrations makes the mistake half of the time; preferences
    then teach it not to. What a prompt of test.jsonl asks about is in no other file; its completion
    is the chosen answer, for scripts/generate.py.
    """

    num_train_rows: int = option(4000)
    num_test_rows: int = option(400, "at most 800")
    num_demonstrations: int = option(12000)

    def of_model(self) -> LlamaOptions:
        """Return what the llama maker needs to make the same model."""
        shape = {one.name: getattr(self, one.name) for one in fields(DecoderOptions)}
        return LlamaOptions(**shape)


@dataclass(frozen=True)
class MistralPretrainOptions(DecoderOptions):
    """A Mistral with a sliding window, and short texts.

    FOLDER/model is a random MistralForCausalLM whose window is shorter than a block of text.
    FOLDER/data holds train.jsonl and test.jsonl, rows of {"text"}: some sentences about a
    person with a made-up name, such as "Toble is a baker in Frim. Every morning Toble goes to the
    mill and buys flour." What a baker buys, makes and dreams of is always the same, while names and
    towns vary, so that a model has facts to learn and names to look up. The people of test.jsonl
    are in no training text.
    """

    vocab_size: int = option(512, f"rows of the embedding, >= {chat.SMALLEST_VOCAB}")
    max_position_embeddings: int = option(512, "longest sequence, in tokens")
    sliding_window: int = option(48, "tokens that a token sees, itself included")
    full_attention: bool = option(False, "no sliding window: a token sees all before it")
    num_train_rows: int = option(6000)
    num_test_rows: int = option(200)


# ---- Models with an encoder: BERT, T5, ViT ----


@dataclass(frozen=True)
class EncoderOptions(Options):
    """The shape of a tiny BERT, T5 or ViT."""

    hidden_size: int = option(128, "a multiple of --num_attention_heads")
    num_hidden_layers: int = option(2)
    num_attention_heads: int = option(4)
    intermediate_size: int = option(256)
    dropout: float = option(0.0, "dropout of hidden states and attention")
    seed: int = option(0)


@dataclass(frozen=True)
class BertOptions(EncoderOptions):
    """A BERT, and made-up reviews.

    FOLDER/model is a random BertModel with a WordPiece tokenizer. FOLDER/data holds train.jsonl and
    test.jsonl, rows of {"text", "label", "stars"}: reviews such as "the soup was not very good and
    the waiter was kind", whose label (negative, mixed or positive, a class) and stars (a number)
    follow from their words. "not" negates the word after it and "very" doubles it, so that a model
    must read words together. No text of test.jsonl is in train.jsonl.
    """

    vocab_size: int = option(320, "rows of the embedding, at least 160")
    max_position_embeddings: int = option(128, "longest sequence, in tokens")
    num_train_rows: int = option(6000)
    num_test_rows: int = option(501)


@dataclass(frozen=True)
class BertNerOptions(BertOptions):
    """A BERT, and sentences with made-up names.

    FOLDER/model is a random BertModel with a WordPiece tokenizer. FOLDER/data holds train.jsonl and
    test.jsonl, rows of {"tokens", "ner_tags"}: the words of sentences such as "brod lamo works for
    frim", and the tag of each: B-PER, I-PER, B-ORG, I-ORG, B-LOC, I-LOC or O. A name has one word
    or two, and the same word may name a person, an organization or a place, so a model has to read
    what stands around it. No word of a name in test.jsonl is in train.jsonl.
    """

    num_train_rows: int = option(4000)
    num_test_rows: int = option(300)


@dataclass(frozen=True)
class T5Options(EncoderOptions):
    """A T5, and sentences with their translation.

    FOLDER/model is a random T5ForConditionalGeneration with a BPE tokenizer. FOLDER/data holds
    train.jsonl and test.jsonl, rows of {"source", "target"}: English sentences such as "the small
    dog sees a red ship" and their translation into a made-up language, "nuka keva zovo rozi fida
    bipo pizu". Each word has its counterpart there, and the order differs: adjectives follow their
    noun, articles come last, the verb ends the sentence. So a model must translate and move words.
    No sentence of test.jsonl is in train.jsonl.
    """

    num_hidden_layers: int = option(2, "layers of the encoder, and of the decoder")
    num_attention_heads: int = option(8)
    dropout: float = option(0.0)
    vocab_size: int = option(320, "rows of the embedding, at least 256")
    num_train_rows: int = option(4000)
    num_test_rows: int = option(200)


@dataclass(frozen=True)
class VitOptions(EncoderOptions):
    """A ViT, and generated images of four classes.

    FOLDER/model is a random ViTModel with its image processor. FOLDER/data holds
    train/CLASS/NUMBER.png and test/CLASS/NUMBER.png: a bright circle, cross, square or triangle on
    dark noise. Color, position, size and angle vary, so that only the shape determines the class.
    """

    image_size: int = option(32, "pixels, a multiple of --patch_size, at least 16")
    patch_size: int = option(8, "pixels")
    num_train_rows: int = option(4000)
    num_test_rows: int = option(400)
