# SPDX-License-Identifier: Apache-2.0
"""Training state as boxes: it is written, and filled into other boxes of the same tensors."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.optim import AdamW8bit, Lion8bit

from core.boxes import FlatSlice, State, boxes_of, cut_into_boxes
from core.checkpoint import Checkpoints, fill, read_whole, saved_tensors
from core.exits import End, Exit
from core.state import (
    changed_group_values,
    get_loss_scale,
    group_values,
    restore_group_values,
    restore_loss_scale,
    state_of,
)
from core.zero import master_weights
from fakes import fake_accelerator

AdamW = torch.optim.AdamW


def nothing():
    """What is to be done once boxes are filled."""


def save(boxes, folder, step=1):
    saver = Checkpoints(folder, limit=9)
    saver.begin(boxes, {"step": step})
    saver.finish()
    return folder / f"checkpoint-{step}"


def trained(optimizer_class, seed, steps=1, **options):
    """A model after some steps, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def restore(model, optimizer, path):
    saved = saved_tensors(path)
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    fill(state_of(model, optimizer, shapes), path, saved)


# ---- Boxes ----
def test_boxes_hold_the_numbers_of_a_slice_in_their_order():
    dice = random.Random(0)
    for _ in range(1000):
        shape = [dice.randint(1, 5) for _ in range(dice.randint(1, 4))]
        whole = torch.arange(math.prod(shape)).view(shape)
        first = dice.randrange(whole.numel())
        stop = dice.randint(first + 1, whole.numel())
        boxes = list(cut_into_boxes(first, stop, shape))
        assert len(boxes) <= 2 * len(shape) - 1
        found = []
        for start, sizes in boxes:
            place = zip(start, sizes, strict=True)
            found += whole[tuple(slice(at, at + size) for at, size in place)].flatten().tolist()
        assert found == list(range(first, stop))


def test_a_tensor_that_is_cut_in_one_way_is_read_in_any_other(tmp_path):
    """As rows, as flat slices that begin within a row, and whole."""
    whole = torch.arange(7.0 * 5 * 3).view(7, 5, 3)

    def in_slices(number):
        size = -(-whole.numel() // number)
        for start in range(0, whole.numel(), size):
            length = min(size, whole.numel() - start)
            yield start, FlatSlice((7, 5, 3), start, length)

    for number in (1, 2, 4, 9):
        boxes = []
        for start, part in in_slices(number):
            boxes += boxes_of("weight", whole.view(-1)[start : start + part.length], part)
        path = save(boxes, tmp_path, step=number)
        ((_, read),) = read_whole(path)
        assert torch.equal(read, whole)
        for other in (1, 3, 8):
            target = torch.zeros_like(whole)
            wanted = []
            for start, part in in_slices(other):
                flat = target.view(-1)[start : start + part.length]
                wanted += boxes_of("weight", flat, part)
            fill(State(wanted, nothing), path, saved_tensors(path))
            assert torch.equal(target, whole)


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (torch.zeros(3, 4), "shape"),  # A vocabulary that was cut, or another rank of adapters
        (torch.zeros(4, 4, dtype=torch.bfloat16), "float32"),
    ],
)
def test_a_tensor_of_another_shape_or_kind_is_refused(part, word, tmp_path):
    path = save(list(boxes_of("weight", torch.ones(4, 4))), tmp_path)
    with pytest.raises(End) as end:
        fill(State(list(boxes_of("weight", part)), nothing), path, saved_tensors(path))
    assert end.value.code == Exit.DATA and word in end.value.why
    assert not part.any()


# ---- Optimizers ----
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {}),
        (AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (AdamW8bit, {}),
        (Lion8bit, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_goes_on_bit_for_bit_in_a_process_that_has_not_stepped(kind, options, tmp_path):
    model, optimizer = trained(kind, seed=1, steps=3, **options)
    path = save(state_of(model, optimizer).boxes, tmp_path)
    other, its_optimizer = trained(kind, seed=2, steps=0, **options)
    restore(other, its_optimizer, path)
    for one in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(3)
        step(*one)
    for weight, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, restored)


@pytest.mark.parametrize("change", ["pop", "add"])
def test_a_state_of_another_model_is_not_taken(change, tmp_path):
    boxes = state_of(*trained(AdamW, seed=1)).boxes
    if change == "pop":
        boxes = [box for box in boxes if box.name != "state.0.weight.exp_avg"]
    else:
        boxes += boxes_of("other", torch.ones(3))
    path = save(boxes, tmp_path)
    with pytest.raises(End) as end:
        restore(*trained(AdamW, seed=2), path)
    assert end.value.code == Exit.DATA and "not all of" in end.value.why


def test_what_training_changes_in_a_group_is_saved_and_what_a_user_sets_is_not():
    """Prodigy estimates its step there, and schedule-free optimizers count theirs."""
    _, optimizer = trained(AdamW, seed=1, steps=0)
    optimizer.param_groups[0] |= {"d": 1e-6, "k": 0, "name": "all"}
    before = group_values(optimizer)
    optimizer.param_groups[0] |= {"d": 2e-4, "k": 3, "lr": 1e-5}
    assert changed_group_values(before, group_values(optimizer)) == [{"d": 2e-4, "k": 3}]


def test_numbers_of_groups_come_back_to_as_many_groups_only():
    """A mesh has more groups than DDP; one that had no number would go on with the first."""
    model = torch.nn.Linear(4, 2)
    optimizer = AdamW([{"params": [weight]} for weight in model.parameters()])
    restore_group_values(optimizer, [{}])  # AdamW's: nothing to restore
    restore_group_values(optimizer, [{"d": 2e-4}, {"d": 3e-4}])
    assert [group["d"] for group in optimizer.param_groups] == [2e-4, 3e-4]
    with pytest.raises(ValueError, match="shorter"):
        restore_group_values(optimizer, [{"d": 2e-4}])


# ---- ZeRO-0 in bf16 ----
def zero0(seed):
    """DeepSpeed's optimizer of ZeRO-0 in bf16: fp32 master weights, and AdamW over them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)).bfloat16()
    low = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in low]
    optimizer = AdamW(masters, lr=1e-3)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    model.zero_optimization_stage = lambda: 0
    return model, SimpleNamespace(fp16_groups=[low], fp32_groups=[masters], optimizer=optimizer)


def test_master_weights_are_saved_in_fp32_and_come_back_with_their_16_bit_copies(tmp_path):
    path = save(state_of(*zero0(seed=1)).boxes, tmp_path)
    assert dict(read_whole(path))["0.weight"].dtype == torch.float32
    model, zero = zero0(seed=2)
    restore(model, zero, path)
    for weight, master in master_weights(zero).items():
        assert weight.dtype == torch.bfloat16 and weight.equal(master.bfloat16())


# ---- fp16's loss scale ----
def test_the_loss_scale_of_accelerates_scaler_comes_back():
    scaled, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    saved = get_loss_scale(fake_accelerator(mixed_precision="fp16", scaler=scaled), None)
    assert saved["scale"] == 8.0
    accelerator = fake_accelerator(mixed_precision="fp16", scaler=other)
    restore_loss_scale(accelerator, None, saved)
    assert get_loss_scale(accelerator, None) == saved


@pytest.mark.parametrize("attribute", ["loss_scaler", "loss_scale_config"])
def test_the_loss_scale_of_deepspeed_comes_back(attribute):
    """ZeRO-1 to 3 have a scaler, ZeRO-0 has a config; neither has a function for its state."""
    scaler = SimpleNamespace(cur_scale=2.0, cur_iter=1, last_overflow_iter=0, scale_window=1000)
    zero = SimpleNamespace(**{attribute: scaler})
    accelerator = fake_accelerator(mixed_precision="fp16", scaler=None)
    saved = get_loss_scale(accelerator, zero)
    assert saved == {"cur_scale": 2.0, "cur_iter": 1, "last_overflow_iter": 0}
    restore_loss_scale(accelerator, zero, {"cur_scale": 8.0, "cur_iter": 5, "other": 3})
    assert (scaler.cur_scale, scaler.cur_iter) == (8.0, 5) and not hasattr(scaler, "other")
