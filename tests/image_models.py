# SPDX-License-Identifier: Apache-2.0
"""Tiny models of five families that read images and text, with their processors, made offline."""

from types import SimpleNamespace

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiny.models import IMAGE_TEMPLATE, byte_level_bpe

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
TOWER |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GEMMA |= {"image_token": "<image_soft_token>"}


def make_tokenizer(tokens, placeholder):
    tokenizer = byte_level_bpe([], 300)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*tokenizer.extra_special_tokens, *tokens]}
    )
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("<image>", placeholder)
    return tokenizer


def make_idefics3():
    tiles = [f"<row_{row}_col_{col}>" for row in range(1, 3) for col in range(1, 3)]
    tokenizer = make_tokenizer(["<global-img>", *tiles], "<image>")
    edges = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(**edges), tokenizer, image_seq_len=4
    )
    of_tower = TOWER | {"num_hidden_layers": 2}
    return processor, transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer)},
        vision_config=of_tower,
        scale_factor=2,
        image_token_id=processor.image_token_id,
    )


def make_llava():
    """Its features come from the layer before the last."""
    tokenizer = make_tokenizer(["<image>"], "<image>")
    size = {"shortest_edge": 32}, {"height": 32, "width": 32}
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size=size[0], crop_size=size[1]),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return processor, transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **TOWER},
        image_token_id=processor.image_token_id,
        vision_feature_layer=-2,
    )


def make_gemma3():
    """Its tower has a pooler that nothing reads."""
    tokenizer = make_tokenizer(list(GEMMA.values()), "<start_of_image>")
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA.items()}
    vars(tokenizer).update(GEMMA | ids)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    return processor, transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "vocab_size": len(tokenizer), "sliding_window": 64},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token_id"],
        eoi_token_index=ids["eoi_token_id"],
        image_token_index=ids["image_token_id"],
    )


def make_qwen(kind, patch_size, sections, **of_tower):
    tokenizer = make_tokenizer(QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = tokenizer.convert_tokens_to_ids(QWEN)
    unit = (2 * patch_size) ** 2
    edges = {"shortest_edge": unit, "longest_edge": 16 * unit}
    images = Qwen2VLImageProcessorPil(patch_size=patch_size, size=edges)
    processor_class = getattr(transformers, f"{kind}Processor")
    # Their processors for videos need torchvision, which nothing here does
    check = processor_class.check_argument_for_proper_class
    processor_class.check_argument_for_proper_class = lambda *_: None
    no_videos = SimpleNamespace(model_input_names=[])
    try:
        processor = processor_class(images, tokenizer, no_videos)
    finally:
        processor_class.check_argument_for_proper_class = check
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    tower |= {"out_hidden_size": 32, "patch_size": patch_size, **of_tower}
    return processor, getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "head_dim": 8, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )


def make_qwen2_5():
    return make_qwen("Qwen2_5_VL", 14, [1, 1, 2], window_size=56, fullatt_block_indexes=[1])


def make_qwen3():
    of_tower = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return make_qwen("Qwen3VL", 16, [2, 1, 1], **of_tower)


FAMILIES = {
    "idefics3": make_idefics3,
    "llava": make_llava,
    "gemma3": make_gemma3,
    "qwen2.5-vl": make_qwen2_5,
    "qwen3-vl": make_qwen3,
}


def make(family):
    """A random model of a family, and its processor with a chat template that marks answers."""
    processor, config = FAMILIES[family]()
    processor.chat_template = processor.tokenizer.chat_template
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:  # With the usual 0.02 a narrow model hardly sees its images
            torch.nn.init.normal_(weight, std=0.2)
    return model, processor


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
