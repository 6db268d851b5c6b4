# SPDX-License-Identifier: Apache-2.0
"""Random models, and tokenizers that are trained on the rows."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    GenerationConfig,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    ViTImageProcessorPil,
)

from tiny.maker import Maker, Shape

END_OF_TURN = "<|end_of_turn|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
# A role token, the text, an end-of-turn token; `generation` marks what the assistant says
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end_of_turn|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end_of_turn|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The same with images, which are parts of messages
PARTS = (
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
)
IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] + '<|end_of_turn|>' }}", PARTS + "{{ '<|end_of_turn|>' }}"
)
# {argument of PreTrainedTokenizerFast: token}, in the order of their ids
CHAT_TOKENS = {
    "pad_token": "<|pad|>",
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
}
BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
T5_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PRINTABLE = [chr(number) for number in range(33, 127)]  # characters of ASCII without the space


# ---- Tokenizers: functions from texts and the number of tokens ----
def byte_level_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer for chat, trained on the texts; digits are never merged.

    Without texts it has no merges, so that each byte is a token.
    """
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*CHAT_TOKENS.values(), END_OF_TURN, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[END_OF_TURN, *ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **CHAT_TOKENS,
    )


def word_piece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, of words of the texts; other words are split into letters.

    The vocabulary is counted here, since the library's trainer breaks ties at random: two calls
    would make different tokenizers.
    """
    normalizer = normalizers.BertNormalizer()
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in pieces)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    letters = [*PRINTABLE, *(f"##{letter}" for letter in PRINTABLE)]
    tokens = list(dict.fromkeys([*BERT_TOKENS.values(), *letters, *words]))
    ids = {token: number for number, token in enumerate(tokens[:vocab_size])}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **BERT_TOKENS,
    )


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
    end = "</s>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, backend.token_to_id(end))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **T5_TOKENS
    )


TOKENIZERS = {
    "chat": byte_level_bpe,
    "bytes": byte_level_bpe,
    "words": word_piece,
    "sentences": sentence_bpe,
}


def make_tokenizer(kind: str, options: Namespace, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind that is trained on the texts."""
    tokenizer = TOKENIZERS[kind](texts, options.vocab_size)
    if kind == "bytes":  # The model reads text, not conversations
        tokenizer.chat_template = None
    length = getattr(options, "max_position_embeddings", None)
    if length is not None:
        tokenizer.model_max_length = length
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast, settings: Shape) -> Idefics3Processor:
    """Return a processor of a tokenizer and of images that are not cut into tiles.

    Args:
        settings: of the model; they get the tokens that the processor adds.
    """
    vision = settings["vision_config"]
    edge = {"longest_edge": vision["image_size"]}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    num_patches = (vision["image_size"] // vision["patch_size"]) ** 2
    processor = Idefics3Processor(
        images,
        tokenizer,
        image_seq_len=num_patches // settings["scale_factor"] ** 2,
        chat_template=IMAGE_TEMPLATE,
    )
    tokenizer.add_tokens([processor.global_image_tag], special_tokens=True)
    tokenizer.chat_template = IMAGE_TEMPLATE
    settings["image_token_id"] = processor.image_token_id
    settings["text_config"]["vocab_size"] = len(tokenizer)
    return processor


# ---- Models ----
def make(maker: Maker, options: Namespace, texts: Sequence[str]) -> tuple[Any, Any]:
    """Return a random model, and its tokenizer or image processor.

    Args:
        texts: on which the tokenizer is trained.
    """
    shape = {name: getattr(options, name) for name in maker.shape}
    if shape.get("num_key_value_heads", 0) is None:
        shape["num_key_value_heads"] = options.num_attention_heads
    settings = maker.settings(shape)
    if "hidden_size" in settings:  # which T5 calls otherwise; it has its own
        # The usual 0.02 suits widths of hundreds and thousands; a narrow model learns much faster
        settings["initializer_range"] = 0.7 * options.hidden_size**-0.5
    further: dict[str, Any] = {"dtype": options.dtype}
    if maker.tokenizer is None:
        size = {"height": options.image_size, "width": options.image_size}
        processor: Any = ViTImageProcessorPil(size=size)
        tokenizer: Any = None
        further["add_pooling_layer"] = False
    else:
        processor = tokenizer = make_tokenizer(maker.tokenizer, options, texts)
        of_text = settings.get("text_config", settings)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(tokenizer, name) is not None:
                of_text[name] = settings[name] = getattr(tokenizer, name)
        if maker.image_size is not None:
            processor = make_processor(tokenizer, settings)
    config = AutoConfig.for_model(maker.model_type, **settings)
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = getattr(transformers, maker.auto_class).from_config(config, **further)
    # With T5's own 0.1 or less all positions look alike, and a narrow model needs thousands of
    # steps to learn to distinguish them.
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight, std=3.0)
    if maker.tokenizer == "chat":
        end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=[end_of_turn, tokenizer.eos_token_id],
            pad_token_id=tokenizer.pad_token_id,
        )
    return model, processor
