# SPDX-License-Identifier: Apache-2.0
"""A tiny ViT, and generated images."""

from pathlib import Path

import numpy as np
import torch
from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

from tiny import images, output, settings
from tiny.options import VitOptions

FLAGS = """--augmentation flip --num_train_epochs 8 --per_device_train_batch_size 64 \\
    --learning_rate 2e-3 --warmup_steps 0.05"""


def make(folder: Path, options: VitOptions) -> None:
    """Write the model and the images; print how to train on them unless quiet."""
    model = make_model(options)
    size = options.image_size
    processor = ViTImageProcessorPil(size={"height": size, "width": size})
    rng = np.random.default_rng(options.seed)
    with output.writing_to(folder):
        patches = (size // options.patch_size) ** 2
        output.save_model(folder / "model", model, processor, f"{patches} patches per image")
        images.write_images(folder / "data" / "train", options.num_train_rows, size, rng)
        images.write_images(folder / "data" / "test", options.num_test_rows, size, rng)
    if not options.quiet:
        output.print_launch("vit", folder, FLAGS, "--dataset_name {data}")


def make_model(options: VitOptions) -> ViTModel:
    """Return a random ViT without a head."""
    torch.manual_seed(options.seed)
    config = ViTConfig(
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        intermediate_size=options.intermediate_size,
        image_size=options.image_size,
        patch_size=options.patch_size,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        initializer_range=settings.initializer_range(options.hidden_size),
    )
    return ViTModel(config, add_pooling_layer=False)
