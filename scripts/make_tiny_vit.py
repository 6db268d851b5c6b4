#!/usr/bin/env python
"""Write a tiny random ViT, its image processor and small drawn images of four classes, from nothing and offline.

OUTPUT_DIR/model is a random ViTModel. OUTPUT_DIR/data holds train/CLASS/NUMBER.png and test/CLASS/NUMBER.png: a bright
circle, cross, square or triangle in any colour, somewhere on dark noise, more or less large and a little turned. So it
is the form alone that tells the class.

    python scripts/make_tiny_vit.py runs/tiny_vit

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors import SafetensorError
from transformers import ViTConfig, ViTImageProcessorPil, ViTModel
from transformers.utils import logging

CLASSES = ("circle", "cross", "square", "triangle")
# Corners around the middle, at a distance of at most 1; a circle has many
CROSS = [(0.3, 0.95), (0.3, 0.3), (0.95, 0.3), (0.95, -0.3), (0.3, -0.3), (0.3, -0.95)]
OUTLINES = {
    "circle": [
        (np.cos(turn), np.sin(turn)) for turn in np.linspace(0, 2 * np.pi, 40, endpoint=False)
    ],
    "cross": [*CROSS, *((-x, -y) for x, y in CROSS)],
    "square": [(0.7, 0.7), (-0.7, 0.7), (-0.7, -0.7), (0.7, -0.7)],
    "triangle": [
        (np.sin(turn), -np.cos(turn)) for turn in np.linspace(0, 2 * np.pi, 3, endpoint=False)
    ],
}


def stop(code, message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument(
        "output_dir", type=Path, help="OUTPUT_DIR/model and OUTPUT_DIR/data are written"
    )
    parser.add_argument(
        "--hidden_size", type=int, default=128, help="a multiple of --num_attention_heads"
    )
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument("--intermediate_size", type=int, default=256)
    parser.add_argument(
        "--image_size", type=int, default=32, help="pixels, a multiple of --patch_size, at least 16"
    )
    parser.add_argument("--patch_size", type=int, default=8, help="pixels")
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden states and attention")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=4000)
    parser.add_argument("--num_test_rows", type=int, default=400)
    return parser.parse_args()


def validate_args(args):
    """Report every problem of the command line at once."""
    sizes = [name for name, value in vars(args).items() if type(value) is int and name != "seed"]
    problems = [f"--{name} must be at least 1" for name in sizes if getattr(args, name) < 1]
    if not problems and args.hidden_size % args.num_attention_heads:
        problems.append("--hidden_size must be a multiple of --num_attention_heads")
    if not problems and (args.image_size % args.patch_size or args.image_size < 16):
        problems.append("--image_size must be a multiple of --patch_size, and at least 16")
    if not 0 <= args.dropout < 1:
        problems.append("--dropout must be at least 0 and below 1")
    if args.seed < 0:
        problems.append("--seed must be at least 0")
    if problems:
        stop(64, "; ".join(problems))


def draw_image(kind, size, rng):
    """Return a bright form on dark noise as an image of size x size pixels."""
    ground, colour = rng.integers(0, 100, 3), rng.integers(130, 256, 3)
    radius, turn = rng.uniform(0.25, 0.42) * size, rng.uniform(-0.3, 0.3)  # pixels, radians
    middle = rng.uniform(radius, size - radius, 2)
    turned = np.array(OUTLINES[kind]) @ np.array(
        [[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]
    )
    form = Image.new("L", (size, size))
    ImageDraw.Draw(form).polygon([tuple(corner) for corner in middle + radius * turned], fill=1)
    pixels = np.where(np.asarray(form)[..., None], colour, ground) + rng.normal(
        0, 20, (size, size, 3)
    )
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_images(folder, number, size, rng):
    """Write so many images, classes taking turns, to FOLDER/CLASS/NUMBER.png, and print how many there are of each."""
    for kind in CLASSES:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for old in (folder / kind).glob(
            "[0-9]" * 5 + ".png"
        ):  # of an earlier call, which may have made more
            old.unlink()
    for i in range(number):
        kind = CLASSES[i % len(CLASSES)]
        draw_image(kind, size, rng).save(folder / kind / f"{i:05}.png", compress_level=1)
    found = [f"{kind} {len(list((folder / kind).iterdir()))}" for kind in CLASSES]
    print(f"{folder}: {number} images ({', '.join(found)})")


def make_model(args):
    """Return a random ViT without a head."""
    torch.manual_seed(args.seed)
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    names += ["image_size", "patch_size"]
    # The default of 0.02 suits widths in the hundreds; a narrow model learns much faster from larger weights
    config = ViTConfig(
        initializer_range=0.7 * args.hidden_size**-0.5,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        **{name: getattr(args, name) for name in names},
    )
    return ViTModel(config, add_pooling_layer=False)


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    model = make_model(args)
    processor = ViTImageProcessorPil(size={"height": args.image_size, "width": args.image_size})
    rng = np.random.default_rng(args.seed)
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        processor.save_pretrained(model_dir)
        patches = (args.image_size // args.patch_size) ** 2
        print(f"{model_dir}: {model.num_parameters():,} parameters, {patches} patches an image")
        write_images(data_dir / "train", args.num_train_rows, args.image_size, rng)
        write_images(data_dir / "test", args.num_test_rows, args.image_size, rng)
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml recipes/vit.py \\
    --model_name_or_path {model_dir} --dataset_name {data_dir} --augmentation flip --num_train_epochs 8 \\
    --per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05 --output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
