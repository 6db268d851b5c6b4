# SPDX-License-Identifier: Apache-2.0
"""recipes/vlm.py has the labels and the loss of TRL's SFTTrainer, for rows with several images and
with none, in five families. TRL's own rows of messages train on images too, which no test wants."""

import io
import re

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import image_models
import vlm
from core.loss import LossInHead
from tasks.illustrated import IllustratedCollator, IllustratedTemplate, tokenize_illustrated

PICTURES = [image_models.picture(60, 40), image_models.picture(30, 90, 1)]
PICTURES.append(image_models.picture(56, 56, 2))
PAIRS = [
    ("What is it?", "a cat", PICTURES[:1]),
    ("And these two?", "dogs!", PICTURES[1:]),
    ("Hello", "Hi there", []),
]


def pair(question, answer, images):
    """A row of a prompt and its completion."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
        "images": images,
    }


def conversation(question, answer, images):
    """A row of messages with two turns, the first with the images."""
    asked = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    said = [asked, [{"type": "text", "text": answer}]]
    said += [[{"type": "text", "text": text}] for text in ("Sure?", "Yes.")]
    messages = [
        {"role": role, "content": content}
        for role, content in zip(["user", "assistant"] * 2, said, strict=True)
    ]
    return {"messages": messages, "images": images}


def encoded(row):
    """A row as a data set of datasets has it, with images in bytes."""
    images = []
    for picture in row["images"]:
        file = io.BytesIO()
        picture.save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    return row | {"images": images}


def our_batch(processor, rows, tmp_path):
    processor.tokenizer.padding_side = "left"  # As some have it: nothing depends on it
    template = IllustratedTemplate(processor.tokenizer, {}, processor)
    options = {"max_length": 2048, "folder": tmp_path, "allow_image_urls": False}
    options["read"] = vlm.row_to_conversation
    prepared = []
    for number, row in enumerate(rows, 1):
        one = tokenize_illustrated(encoded(row), template=template, **options)
        prepared.append({**one, "row": number})
    collator = IllustratedCollator(template, lambda number: rows[number - 1]["images"], True)
    dataset = Dataset.from_list(prepared).with_format("numpy")
    return collator(dataset, [[number] for number in range(len(rows))])


@pytest.mark.parametrize("make_row", [pair, conversation])
@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_labels_and_loss_are_those_of_trl(family, make_row, tmp_path):
    model, processor = image_models.make(family)
    # TRL has no row without images beside others in its messages
    rows = [make_row(*given) for given in PAIRS[: 3 if make_row is pair else 2]]
    trainer = SFTTrainer(
        model=model,
        processing_class=processor,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        args=SFTConfig(
            output_dir=tmp_path,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            max_length=None,
            assistant_only_loss=make_row is conversation,
        ),
    )
    theirs = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    labels = theirs["labels"][:, 1:]
    number = (labels != -100).sum()
    expected = trainer.compute_loss(model, dict(theirs), num_items_in_batch=number)
    expected.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    batch = our_batch(processor, rows, tmp_path)
    assert batch["targets"].tolist() == labels[labels != -100].tolist()
    assert batch["counts"].tolist() == [number, theirs["attention_mask"].sum()]
    loss = LossInHead(model, None, torch.device("cpu"))(model, batch) / number
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    whole = torch.nn.utils.get_total_norm([one for one in gradients.values() if one is not None])
    for name, weight in model.named_parameters():
        if gradients[name] is None:
            assert weight.grad is None, name
        else:  # Orders of addition differ, and a bias of keys has the gradient 0 but for rounding
            gap = (weight.grad - gradients[name]).norm()
            assert gap <= 1e-4 * gradients[name].norm() + 1e-6 * whole, name


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_exactly_what_has_no_gradient_is_frozen_as_such(family, tmp_path):
    """Under DDP a step would wait for it. A blank image gives all others one of zero."""
    model, processor = image_models.make(family)
    pattern = re.compile(vlm.find_parts(model)["layers without effect"])
    batch = our_batch(processor, [pair(*PAIRS[2])], tmp_path)
    assert len(batch["inputs"]["input_ids"]) == 2  # The second one has the blank image
    LossInHead(model, None, torch.device("cpu"))(model, batch).backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == {name for name, _ in model.named_parameters() if pattern.search(name)}
    parts = vlm.find_parts(model)
    tower = [
        weight
        for name, weight in model.named_parameters()
        if re.search(parts["vision tower"], name)
    ]
    assert not any(weight.grad.any() for weight in tower if weight.grad is not None)


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_a_blank_image_leaves_the_loss_as_it_is(family, tmp_path):
    model, processor = image_models.make(family)
    [row] = [pair(*PAIRS[2])]
    batch = our_batch(processor, [row], tmp_path)
    loss = LossInHead(model, None, torch.device("cpu"))(model, batch) / batch["counts"][0]
    text = [row["prompt"][0], row["completion"][0]]
    tokens = processor.apply_chat_template(
        [[{**said, "content": [{"type": "text", "text": said["content"]}]} for said in text]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )
    mask = torch.as_tensor(tokens.pop("assistant_masks"))
    model, _ = image_models.make(family)
    logits = model(**tokens).logits[0, :-1]
    labels = tokens["input_ids"][0, 1:].masked_fill(mask[0, 1:] == 0, -100)
    alone = torch.nn.functional.cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
