# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_distill.py has the divergences of TRL's GKD, and their gradients, in pieces, from a
teacher that is whole, in 4 bits or split over ranks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

import net
from core.exits import End
from ranks import on_ranks
from rehearsal.cpu_patches import treat_cpu_as_gpu
from tasks.distillation import DistillationInHead, FrozenModel, check_same_tokens

BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}  # TRL's names of the three
IDS = torch.randint(5, 90, (3, 17), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(3 * 17).view(3, 17)[:, 4:-1].flatten()
BATCH = {
    "inputs": {"input_ids": IDS},
    "positions": POSITIONS,
    "targets": IDS.flatten()[POSITIONS + 1],
}


@pytest.fixture(scope="module")
def models(net_tiny, tmp_path_factory):
    """Student and teacher; the teacher's head is padded, as Qwen's sizes differ."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(1)
    student = net_tiny("llama") / "model"
    teacher = AutoModelForCausalLM.from_pretrained(student, dtype="float32")
    for weight in teacher.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 24)
    teacher.save_pretrained(folder)
    return student, folder


def plain_loss(student, teacher, args):
    """The mean loss of the tokens trained on, from whole logits and TRL's formula."""
    from trl.experimental.gkd import GKDTrainer

    logits, wanted = (
        model(**BATCH["inputs"]).logits.flatten(0, 1)[POSITIONS][:, : student.config.vocab_size]
        for model in (student, teacher)
    )
    loss = GKDTrainer.generalized_jsd_loss(
        logits[None],
        wanted.detach()[None],
        BATCH["targets"][None],
        beta=BETAS[args.loss_type],
        temperature=args.temperature,
    )
    if args.hard_loss_share:
        soft = loss * args.temperature**2
        hard = cross_entropy(logits, BATCH["targets"])
        loss = (1 - args.hard_loss_share) * soft + args.hard_loss_share * hard
    return loss


@pytest.mark.parametrize("loss_type", BETAS)
@pytest.mark.parametrize(("temperature", "hard_loss_share"), [(1.0, 0.0), (2.0, 0.0), (2.0, 0.3)])
def test_loss_and_gradients_are_those_of_trl(loss_type, temperature, hard_loss_share, models):
    whole, ours = (
        AutoModelForCausalLM.from_pretrained(models[0], dtype="float32") for _ in range(2)
    )
    args = SimpleNamespace(
        model_name_or_path=models[0],
        max_logits_mib=0.02,  # several pieces
        loss_type=loss_type,
        beta=BETAS[loss_type],
        temperature=temperature,
        hard_loss_share=hard_loss_share,
    )
    teacher = AutoModelForCausalLM.from_pretrained(models[1], dtype="float32")
    expected = plain_loss(whole, teacher, args)
    expected.backward()
    accelerator = Accelerator(cpu=True)
    frozen = FrozenModel(str(models[1]), accelerator, "float32", False)
    loss_of = DistillationInHead(ours, args, accelerator.device, frozen)
    loss = loss_of(ours, BATCH) / len(POSITIONS)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, one), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
        # The pieces are added in another order than the whole
        assert (one.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name


ENGINES = {
    "FSDP1": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 1},
    "FSDP2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2},
    "ZeRO-3": {"ACCELERATE_USE_DEEPSPEED": "true"},
}


def logits_and_sizes(folder, engine, in_4_bits):
    """A teacher's logits, the elements that this rank holds, and whether later models are split."""
    plugin = DeepSpeedPlugin(zero_stage=3) if engine == "ZeRO-3" else None
    accelerator = Accelerator(deepspeed_plugin=plugin)
    teacher = FrozenModel(str(folder), accelerator, "float32", in_4_bits)
    logits = teacher.logits(teacher.hidden_states(BATCH))
    held = 0
    for weight in teacher.model.parameters():
        held += (weight.to_local() if isinstance(weight, DTensor) else weight).numel()
    return logits.tolist(), held, is_deepspeed_zero3_enabled()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("in_4_bits", [False, True], ids=["fp32", "nf4"])
def test_a_teacher_is_split_over_ranks_or_whole_in_4_bits(engine, in_4_bits, models):
    check = partial(logits_and_sizes, models[1], engine, in_4_bits)
    # accelerate takes them for GPUs
    found = on_ranks(check, 2, treat_cpu_as_gpu, **ENGINES[engine])
    (one, held, splits), (other, _, _) = found
    [(whole, size, _)] = on_ranks(partial(logits_and_sizes, models[1], "", in_4_bits))
    assert one == other == whole
    assert held == (size if in_4_bits else size // 2)
    assert splits == (engine == "ZeRO-3")


def test_a_teacher_may_be_a_folder_of_adapters(models, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models[1], dtype="float32")
    adapted = get_peft_model(base, LoraConfig(init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path)
    teacher = FrozenModel(str(tmp_path), Accelerator(cpu=True), "float32", False)
    logits = adapted(**BATCH["inputs"]).logits.flatten(0, 1)[POSITIONS]
    # A product over chosen rows may round otherwise than one over all
    torch.testing.assert_close(teacher.logits(teacher.hidden_states(BATCH)), logits)


def test_a_teacher_with_other_tokens_is_refused(models, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    check_same_tokens(str(models[0]), tokenizer)
    tokenizer.add_tokens("<think>")
    with pytest.raises(End):
        check_same_tokens(str(models[0]), tokenizer)
    [line] = capsys.readouterr().err.splitlines()
    assert "'<think>'" in line and "--teacher_model_name_or_path" in line


SHARED_LINES = {
    "ddp": ("--packing", "--max_length", "128"),
    "fsdp2_full_shard": ("--padding_free",),
}


@pytest.mark.parametrize("config", SHARED_LINES)
def test_a_student_that_is_its_own_teacher_has_no_loss(config, net_tiny, tmp_path):
    """Rows that share a line are apart in both."""
    tiny = net_tiny("llama_distill")
    one_step = ("--max_steps", "1", *SHARED_LINES[config])
    cell = net.Cell(config, "llama_distill", ranks=2, riding=one_step)
    same = ("--teacher_model_name_or_path", tiny / "model")
    done = net.launch(cell, tiny, tmp_path / "run", *same).expect(0)
    assert abs(net.metrics(done.folder)[0]["loss"]) < 1e-6
