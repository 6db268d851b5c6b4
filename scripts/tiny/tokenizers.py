# SPDX-License-Identifier: Apache-2.0
"""The tokenizers of the tiny models."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tiny import chat

# {argument of PreTrainedTokenizerFast: token}, in the order of their ids
BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
T5_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PRINTABLE = [chr(number) for number in range(33, 127)]  # characters of ASCII without the space


def with_ids(tokens: Iterable[str], backend: Tokenizer) -> list[tuple[str, int]]:
    """Return each token with its id."""
    ids = backend.get_vocab()
    return [(token, ids[token]) for token in tokens]


def byte_level_bpe(
    texts: Iterable[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer for chat, trained on the texts; digits are never merged.

    Without texts it has no merges, so that each byte is a token.
    """
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=chat.SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[chat.END_OF_TURN, *chat.ROLES],
        chat_template=chat.CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **chat.NAMED_TOKENS,
    )


def word_piece(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, of words of the texts; other words are split into letters.

    The vocabulary is counted here, since the library's trainer breaks ties at random: two calls
    would make different tokenizers.
    """
    vocabulary = count_vocabulary(texts, vocab_size)
    ids = {token: number for number, token in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=with_ids(["[CLS]", "[SEP]"], backend),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **BERT_TOKENS,
    )


def count_vocabulary(texts: Iterable[str], vocab_size: int) -> list[str]:
    """Return BERT's own tokens, letters that begin or continue a word, and frequent words."""
    normalizer = normalizers.BertNormalizer()
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in pieces)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    letters = [*PRINTABLE, *(f"##{letter}" for letter in PRINTABLE)]
    tokens = dict.fromkeys([*BERT_TOKENS.values(), *letters, *words])
    return list(tokens)[:vocab_size]


def sentence_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer like T5's, a BPE trained on the texts; other words are spelled.

    Every text ends with </s>.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(T5_TOKENS.values()),
        initial_alphabet=["▁", *PRINTABLE],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>",
        pair="$A </s> $B </s>",
        special_tokens=with_ids(["</s>"], backend),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        **T5_TOKENS,
    )
