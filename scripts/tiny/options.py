# SPDX-License-Identifier: Apache-2.0
"""The options of each maker, and what it refuses.

Each field of a dataclass is a flag of the command, and the docstring is the maker's --help. Nothing
here imports torch, so that a wrong call is refused at once.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tiny import chat, skills

BLOCK = 64  # weights that share a scale in 4-bit quantization
SMALLEST_BERT_VOCAB = 160  # frequent words of the rows, letters, special tokens
SMALLEST_T5_VOCAB = 256  # letters, special tokens and room for every word of both languages
MOST_SENTENCES = 200_000  # the words of tiny/t5.py make 470,400 sentences
MOST_PAIRS_HELD_OUT = 800  # leaves most of the numbers to train on


def option(default: Any, help: str = "") -> Any:
    """Declare a field that is a flag of the command."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """What all makers have in common."""

    quiet: bool = option(False, "do not print a command that trains on what was made")

    def problems(self) -> list[str]:
        """Return everything that is wrong, each naming the flag."""
        problems = []
        for name, value in vars(self).items():
            if type(value) is int and name != "seed" and value < 1:
                problems.append(f"--{name} must be at least 1")
        if not problems:
            problems += self.shape_problems()
        return problems + self.value_problems()

    def shape_problems(self) -> list[str]:
        """Return which sizes do not fit together; all of them are at least 1."""
        return []

    def value_problems(self) -> list[str]:
        """Return which other values are out of their range."""
        return []


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

    @property
    def key_value_heads(self) -> int:
        """Return the number of key and value heads that the model gets."""
        if self.num_key_value_heads is None:
            return self.num_attention_heads
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Return the width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def shape_problems(self) -> list[str]:
        problems = []
        if self.hidden_size % self.num_attention_heads != 0 or self.head_size % 2 != 0:
            problems.append("--hidden_size / --num_attention_heads must be a whole, even number")
        if self.num_attention_heads % self.key_value_heads != 0:
            problems.append("--num_attention_heads must be a multiple of --num_key_value_heads")
        problems += uneven_width("--hidden_size", self.hidden_size)
        problems += uneven_width("--intermediate_size", self.intermediate_size)
        return problems


def uneven_width(name: str, width: int) -> list[str]:
    """Return the problem of a width that 4-bit quantization cannot cut into whole blocks."""
    if width % BLOCK == 0:
        return []
    return [f"{name} must be a multiple of {BLOCK}, not {width}"]


def too_few_tokens(vocab_size: int) -> list[str]:
    """Return the problem of a vocabulary that is too small for every byte."""
    if vocab_size >= chat.SMALLEST_VOCAB:
        return []
    smallest = chat.SMALLEST_VOCAB
    return [f"--vocab_size must be at least {smallest} (256 bytes and the special tokens)"]


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
    num_test_rows: int = option(700, f"at most {skills.MOST_TEST_ROWS}")

    def shape_problems(self) -> list[str]:
        problems = super().shape_problems()
        width = self.key_value_heads * self.head_size
        problems += uneven_width("--num_key_value_heads x head size", width)
        problems += too_few_tokens(self.vocab_size)
        if self.num_test_rows > skills.MOST_TEST_ROWS:
            problems.append(f"--num_test_rows must be at most {skills.MOST_TEST_ROWS}")
        return problems

    def value_problems(self) -> list[str]:
        if self.text is not None and self.text.suffix not in (".txt", ".jsonl"):
            return [f"--text must be a .txt or .jsonl file, not {self.text}"]
        return []


@dataclass(frozen=True)
class MixtralOptions(LlamaOptions):
    """A Mixtral, and the rows of the llama maker.

    FOLDER/model is a random MixtralForCausalLM, with a tokenizer and a chat template. A token takes
    two of the --num_local_experts experts of each layer. FOLDER/data is that of the llama maker.
    """

    intermediate_size: int = option(192, "size of each expert; a multiple of 64")
    num_local_experts: int = option(4, "experts in each layer, at least 2")

    def shape_problems(self) -> list[str]:
        problems = super().shape_problems()
        if self.num_local_experts == 1:
            problems.append("--num_local_experts must be at least 2: a token takes two of them")
        return problems


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
    num_test_rows: int = option(400, f"at most {MOST_PAIRS_HELD_OUT}")
    num_demonstrations: int = option(12000)

    def of_model(self) -> LlamaOptions:
        """Return what the llama maker needs to make the same model."""
        shape = {one.name: getattr(self, one.name) for one in fields(DecoderOptions)}
        return LlamaOptions(**shape)

    def shape_problems(self) -> list[str]:
        return self.of_model().shape_problems()

    def value_problems(self) -> list[str]:
        if self.num_test_rows > MOST_PAIRS_HELD_OUT:
            return [f"--num_test_rows must be at most {MOST_PAIRS_HELD_OUT}"]
        return []


@dataclass(frozen=True)
class MistralPretrainOptions(DecoderOptions):
    """A Mistral with a sliding window, and short texts.

    FOLDER/model is a random MistralForCausalLM whose window is shorter than a block of text.
    FOLDER/data holds train.jsonl and test.jsonl, rows of {"text"}, and with --txt a folder of
    train*.txt and test*.txt as well. A text is some sentences about a person with a made-up name:
    "Toble is a baker in Frim. Every morning Toble goes to the mill and buys flour." What a baker
    buys, makes and dreams of is always the same, while names and towns vary, so that a model has
    facts to learn and names to look up. The people of test.jsonl are in no training text.
    """

    txt: bool = option(False, "also write each text to a file of its own, in data/txt")
    vocab_size: int = option(512, f"rows of the embedding, >= {chat.SMALLEST_VOCAB}")
    max_position_embeddings: int = option(512, "longest sequence, in tokens")
    sliding_window: int = option(48, "tokens that a token sees, itself included")
    full_attention: bool = option(False, "no sliding window: a token sees all before it")
    num_train_rows: int = option(6000)
    num_test_rows: int = option(200)

    def shape_problems(self) -> list[str]:
        return super().shape_problems() + too_few_tokens(self.vocab_size)


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

    def shape_problems(self) -> list[str]:
        if self.hidden_size % self.num_attention_heads != 0:
            return ["--hidden_size must be a multiple of --num_attention_heads"]
        return []

    def value_problems(self) -> list[str]:
        if not 0 <= self.dropout < 1:
            return ["--dropout must be at least 0 and below 1"]
        return []


@dataclass(frozen=True)
class BertOptions(EncoderOptions):
    """A BERT, and made-up reviews.

    FOLDER/model is a random BertModel with a WordPiece tokenizer. FOLDER/data holds train.jsonl and
    test.jsonl, rows of {"text", "label", "stars"}: reviews such as "the soup was not very good and
    the waiter was kind", whose label (negative, mixed or positive, a class) and stars (a number)
    follow from their words. "not" negates the word after it and "very" doubles it, so that a model
    must read words together. No text of test.jsonl is in train.jsonl.
    """

    vocab_size: int = option(320, f"rows of the embedding, at least {SMALLEST_BERT_VOCAB}")
    max_position_embeddings: int = option(128, "longest sequence, in tokens")
    num_train_rows: int = option(6000)
    num_test_rows: int = option(501)

    def value_problems(self) -> list[str]:
        problems = super().value_problems()
        if self.vocab_size < SMALLEST_BERT_VOCAB:
            why = "words of the rows, letters, special tokens"
            problems.append(f"--vocab_size must be at least {SMALLEST_BERT_VOCAB} ({why})")
        return problems


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
    vocab_size: int = option(320, f"rows of the embedding, >= {SMALLEST_T5_VOCAB}")
    untied: bool = option(False, "an output head of its own, as Flan-T5 has")
    num_train_rows: int = option(4000)
    num_test_rows: int = option(200)

    def value_problems(self) -> list[str]:
        problems = super().value_problems()
        if self.vocab_size < SMALLEST_T5_VOCAB:
            why = "letters, special tokens, words"
            problems.append(f"--vocab_size must be at least {SMALLEST_T5_VOCAB} ({why})")
        if self.num_train_rows + self.num_test_rows > MOST_SENTENCES:
            most = f"{MOST_SENTENCES:,} together"
            problems.append(f"--num_train_rows and --num_test_rows must be at most {most}")
        return problems


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

    def shape_problems(self) -> list[str]:
        problems = super().shape_problems()
        if self.image_size % self.patch_size != 0 or self.image_size < 16:
            problems.append("--image_size must be a multiple of --patch_size, and at least 16")
        return problems

    def value_problems(self) -> list[str]:
        problems = super().value_problems()
        if self.seed < 0:
            problems.append("--seed must be at least 0")
        return problems
