# SPDX-License-Identifier: Apache-2.0
r"""Image classification and regression with any model of AutoModelForImageClassification, ViT here.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/vit.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/vit.py --dataset_name photos --augmentation flip
    accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml --num_processes 8 \
        recipes/vit.py --use_peft --learning_rate 5e-4

A good run prints a summary with the classes, an accuracy that rises, and the folder that
`from_pretrained` loads. The same command again continues from the newest checkpoint. Exit codes:
core/exits.py. To make it yours: python scripts/copy_recipe.py vit my_project, then look for
EDIT.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from accelerate.utils import set_seed
from PIL import Image, ImageOps
from torch.nn.modules.batchnorm import _NormBase
from transformers import AutoImageProcessor, AutoModelForImageClassification

from core.arguments import CommonArguments, DenseModelArguments, RowArguments
from core.batches import Line, Plan, rows_of_lines
from core.cli import NOT_NEGATIVE, arg, free, parse
from core.data import (
    Rows,
    describe_rows,
    hold_out_and_mix,
    missing_columns,
    open_sources,
    prepare_rows,
)
from core.engine import Layout, backward_of_sum, is_sharded, make_accelerator
from core.exits import Exit, fail
from core.export import save_model
from core.model import base_model_of, loading, make_optimizer, read_config
from core.run import Run
from tasks.images import (
    cast_pixels,
    check_image,
    choose_num_workers,
    decode_image,
    hash_of_image,
    open_images,
)
from tasks.labels import (
    LabelArguments,
    add_labels,
    describe_classes,
    evaluate_classifier,
    find_classes,
    label_tensors,
    load_classifier,
    read_label,
    weighted_row_losses,
)


@dataclass(kw_only=True)
class Arguments(CommonArguments, DenseModelArguments, LabelArguments, RowArguments):
    """Image classification."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    LOSS_UNIT = "nats per image"
    model_name_or_path: str = "google/vit-base-patch16-224-in21k"  # Apache-2.0
    # EDIT: your data set. Default: 1,034 photos of leaves, 3 classes (MIT license)
    dataset_name: str = arg(
        "AI-Lab-Makerere/beans",
        "hub id, .parquet file, or folder of CLASS/IMAGE, which may be inside train/ and test/",
    )
    output_dir: str = "runs/vit"
    COLUMN_ARGUMENTS = {"image": "image_column_name", "label": "label_column_name"}
    image_column_name: str = arg("image", "column of the image; folders of images have none")
    label_column_name: str | None = arg(None, "column of the label [label, or labels]")
    augmentation: Literal["crop_flip", "flip", "none"] = arg(
        "crop_flip", "random resized crop and flip of training images, others in each epoch"
    )
    # pyrefly: ignore[bad-override-mutable-attribute]  # images have no lengths
    train_sampling_strategy: Literal["random", "sequential"] = arg("random", "order of the images")
    # pyrefly: ignore[bad-override-mutable-attribute]  # wider: only this recipe reads it
    dataloader_num_workers: int | None = free(
        None, "processes per GPU that decode images [one per core of the GPU]", NOT_NEGATIVE
    )


# ---- Data ----
def label_image(
    row: Mapping[str, Any], image_column: str, label_columns: Sequence[str]
) -> dict[str, Any]:
    """Return an image's label, as text and as a number, and a hash of image and label.

    The image stays encoded.

    Args:
        label_columns: the label is in the first of these that the row has.
    """
    found = [name for name in label_columns if name in row]
    if image_column not in row or not found:
        needed = f"{image_column} and {' or '.join(label_columns)}"
        raise ValueError(missing_columns(row, needed, "image", "label"))
    label = row[found[0]]
    check_image(row[image_column], label)
    return {**read_label(label, found[0]), "hash": hash_of_image(row[image_column], label)}


def load_data(args: Arguments) -> tuple[Rows, Rows | None, dict[str, int]]:
    """Return the images to train on, those to evaluate on, and the classes. EDIT: add filters.

    The rows are their labels; the images stay where they are, in `sources` of the rows.
    """
    label_columns = ["label", "labels"]
    if args.label_column_name:
        label_columns = [args.label_column_name]
    label = partial(label_image, image_column=args.image_column_name, label_columns=label_columns)
    train, test = open_sources(args, partial(open_images, columns=[args.image_column_name]))
    rows = prepare_rows(train, label, args)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["label_text"] != "unclear")
    found = [name for name in label_columns if name in train[0].dataset.column_names]
    classes = find_classes(rows, args, found[0], read_config(args))
    rows = add_labels(rows, classes, args)
    eval_rows = add_labels(prepare_rows(test, label, args), classes, args) if test else None
    return *hold_out_and_mix(args, rows, eval_rows), classes


def images_of(rows: Rows, args: Arguments) -> Any:
    """Return all images of a split, in the column image; that of a row is at its number - 1."""
    images = rows.sources[0].dataset.select_columns(args.image_column_name)
    return images.rename_columns({args.image_column_name: "image"})


def augment(
    picture: Image.Image, size: tuple[int, int], augmentation: str, rng: np.random.Generator
) -> Image.Image:
    """Return a training image of this size, cropped and mirrored at random.

    A crop has 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3. Half of all images are
    mirrored.

    Args:
        size: (height, width) of the result.
    """
    if "crop" in augmentation:
        area = picture.width * picture.height * rng.uniform(0.08, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        # A crop that is larger than the image is cut to it, where torchvision would draw again
        width = min(picture.width, math.sqrt(area * aspect))
        height = min(picture.height, math.sqrt(area / aspect))
        left = rng.uniform(0, picture.width - width)
        top = rng.uniform(0, picture.height - height)
        box = (left, top, left + width, top + height)
        picture = picture.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    if "flip" in augmentation and rng.random() < 0.5:
        return ImageOps.mirror(picture)
    return picture


@dataclass(frozen=True)
class ImageCollator:
    """Make a batch of labeled images.

    An image's augmentation depends only on seed, epoch and row. The numbers of rows count on from
    epoch to epoch, so that they say both. A batch has these entries:
        inputs: pixel_values, [rows, channels, height, width].
        labels, weights: [rows].
        counts: the sum of the weights, and the number of rows.
        row: places in `encoded`, from 1, on the host.

    Attributes:
        encoded: the images, in the column image.
        size: (height, width) of the model's input.
        seed: of the augmentation.
    """

    columns: ClassVar[list[str]] = ["labels", "weights", "row"]
    encoded: Any
    processor: Any
    size: tuple[int, int]
    augmentation: str = "none"
    seed: int = 0

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        drawn = [divmod(number, len(source)) for line in lines for number in line]
        rows = rows_of_lines(source, [[index for _, index in drawn]])
        pictures = []
        for (epoch, _), row in zip(drawn, rows, strict=True):
            pictures.append(self._draw(int(row["row"]), epoch))
        options = {}
        if "crop" in self.augmentation:  # the crops have the model's size already
            options = {"do_resize": False, "do_center_crop": False}
        # A rank without rows runs the model on one image, so that collective calls still match
        pictures = pictures or [Image.new("RGB", self.size[::-1])]
        inputs = self.processor(pictures, return_tensors="pt", **options)
        labels = label_tensors(rows, source)
        return {
            "inputs": {"pixel_values": inputs["pixel_values"]},
            **labels,
            "counts": torch.tensor([labels["weights"].sum(), len(rows)]),
            "row": [int(row["row"]) for row in rows],
        }

    def _draw(self, row: int, epoch: int) -> Image.Image:
        """Return the image of a row, upright and augmented."""
        picture = decode_image(self.encoded[row - 1]["image"])
        rng = np.random.default_rng((self.seed, epoch, row))
        return augment(picture, self.size, self.augmentation, rng)


def load_processor(args: Arguments) -> tuple[Any, tuple[int, int]]:
    """Return the image processor, and the (height, width) of its output for any image."""
    with loading("image processor", args.model_name_or_path):
        # Pillow, so that pixels are the same with and without torchvision
        processor = AutoImageProcessor.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision,
            backend="pil",
            trust_remote_code=False,
        )
        found = processor([Image.new("RGB", (64 * n, 64)) for n in (1, 2)], return_tensors="pt")
    return processor, tuple(found["pixel_values"].shape[-2:])


def settle_statistics(model: Any, args: Arguments, layout: Layout) -> None:
    """Keep BatchNorm's running statistics beside adapters, or end with 64 if they would be wrong.

    No adapter has the statistics of a frozen BatchNorm, so they stay as they are.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            found.append(module)
            if args.use_peft and ".modules_to_save." not in path:
                vars(module.eval())["train"] = lambda mode=True: None
    if found and is_sharded(layout.accelerator):
        fail(
            Exit.USAGE,
            f"{type(base_model_of(model)).__name__} has BatchNorm layers, and {layout.strategy} "
            "does not keep their running statistics equal on all ranks: use ddp.yaml, which does",
        )
    if found and args.gradient_checkpointing != "no" and not args.use_peft:
        cause = "the running statistics of BatchNorm layers would move twice in each step"
        fail(Exit.USAGE, f"--gradient_checkpointing: {cause}: leave it out")


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    processor, size = load_processor(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows, classes = load_data(args)
    encoded = images_of(train_rows, args)
    num_workers = choose_num_workers(args.dataloader_num_workers, accelerator)
    plan = Plan(replace(args, dataloader_num_workers=num_workers), layout, len(train_rows))
    run.check_plan(plan, train_rows, eval_rows)
    collator = ImageCollator(encoded, processor, size, args.augmentation, args.seed)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step, counts_on=True)
    eval_loader = None
    if eval_rows is not None:
        collator = ImageCollator(images_of(eval_rows, args), processor, size)
        eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model, of_head = load_classifier(AutoModelForImageClassification, args, list(classes), layout)
    config = model.config
    cast_pixels(model)
    settle_statistics(model, args, layout)
    notes = describe_rows(train_rows, eval_rows) | of_head
    first = train_rows.dataset[0]
    path = encoded[int(first["row"]) - 1]["image"]["path"]
    notes["labels"] = describe_classes(classes)
    notes["workers"] = f"{num_workers} processes per rank decode images"
    notes["batch"] = plan.describe_batch()
    notes["sample"] = f"{path} -> {first['label_text']}"
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate_classifier, run, layout, model)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # The sum of the images' weights, and the number of images.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        weight, num_images = counts
        losses = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = weighted_row_losses(model, batch)[0] / weight
                losses.append(loss.detach())
                # Backward, without the division by ranks and micro-batches that engines add
                backward_of_sum(layout, loss)
                if accelerator.sync_gradients:
                    max_norm = args.max_grad_norm or math.inf  # 0 only measures the norm
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    # Has optimizer.step() change nothing if the gradient is NaN or infinite
                    run.skip_if_not_finite(grad_norm, losses, micro_batches)
                # These act after the last micro-batch only. The schedule is not prepared:
                # accelerate would step it once per rank.
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        run.finish_step(losses, grad_norm, num_images.long(), epoch=step / plan.steps_per_epoch)
        if eval_loader and step in plan.evaluate_after:
            measure(eval_loader)

    # ---- Save ----
    save_model(accelerator, model, processor, args.output_dir, config=config)
    run.finish(f"Its curve: python scripts/plot_loss.py {args.output_dir}")


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args, counts="images") as run:
        train(args, run)


if __name__ == "__main__":
    main()
