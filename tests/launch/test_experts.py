# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over ranks train as those of one process, and are saved whole."""

import shutil
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import mixtral
from components import upstream
from components.arguments import TrainingArguments
from components.cli import parse_arguments
from components.experts import modules_of_experts
from components.optimizer import make_adamw
from components.strategy import new_accelerator
from components.weights import load_pretrained
from fakes import mixture_of_two
from harm import shows_harm_without
from launching import REPO, data_of, read_json, read_metrics, rehearse
from proof.compare import SHARDED_GRAD_NORM, compare
from proof.jobs import JOB, MESH_CUT, run_on_mesh
from proof.trials.outcome import hash_of_state
from ranks import on_ranks
from tiny import makers

MIXTRAL = REPO / "recipes" / "mixtral.py"
# As in proof/compare.py, where the bounds are justified
BOUNDS = {"loss": 1e-6, "grad_norm": SHARDED_GRAD_NORM, "weights": 1e-5}
EVERY_TEN = ["--save_steps", 10, "--save_total_limit", 3]
# Has accelerate take CPU ranks for GPUs also without an engine, and DDP for those of no device
AS_ON_GPUS = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
}
# (YAML, ranks, --ep_size)
CASES = [("ep", 2, 2), ("ep", 4, 2), ("fsdp2_ep", 4, 4), ("fsdp2_ep", 4, 2)]


@pytest.fixture(scope="session")
def mixture(once):
    """The folder with a tiny mixture of 4 experts and its rows."""
    maker, *shape = run_on_mesh("single", 1, recipe="mixtral").maker
    return once("mixture", partial(makers.make, maker, words=shape))


def train(mixture, config, ranks, folder, *flags):
    """Train the mixture with 16 rows per step, and return how it ended."""
    batch, accumulation = MESH_CUT[ranks]
    cut = ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
    words = [*data_of(mixture), *JOB, *cut, *EVERY_TEN, *flags, "--output_dir", folder]
    return rehearse(
        config,
        *words,
        num_processes=ranks,
        report=folder.with_suffix(".json"),
        mixed_precision="no",
        script=MIXTRAL,
    )


@pytest.fixture(scope="session")
def trained(once, mixture):
    """A function from a YAML, ranks and flags to the finished run."""

    def run(config, ranks, flags, folder):
        done = train(mixture, config, ranks, folder, *flags)
        assert done.returncode == 0, done.output[-3000:]

    def find(config, ranks, *flags):
        name = "_".join(map(str, ["experts", config, ranks, *flags]))
        return once(name, partial(run, config, ranks, flags))

    return find


def assert_agrees(folder, whole):
    found = compare(folder, whole)
    assert all(found[name] <= bound for name, bound in BOUNDS.items()), found
    for ours, theirs in zip(read_metrics(folder)[0], read_metrics(whole)[0], strict=True):
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-6)
        assert ours["max_expert_load"] == pytest.approx(theirs["max_expert_load"], rel=1e-6)


@pytest.mark.parametrize(("config", "ranks", "size"), CASES)
def test_spread_experts_give_the_numbers_of_one_process(config, ranks, size, trained):
    folder = trained(config, ranks, "--ep_size", size)
    assert_agrees(folder, trained("single", 1))
    assert max(line["grad_norm"] for line in read_metrics(folder)[0]) > 0.5  # It was clipped
    report = read_json(folder.with_suffix(".json"))
    assert report["verdict"] == "ok"


# Not DDP on more than two ranks: it adds gradients up in another order in the first step of a run
@pytest.mark.parametrize(("config", "ranks", "size"), [CASES[0], CASES[3]])
def test_a_run_that_continues_ends_bit_for_bit_as_if_it_had_not_stopped(
    config, ranks, size, trained, mixture, tmp_path
):
    whole = trained(config, ranks, "--ep_size", size)
    done = go_on(whole, tmp_path / "run", mixture, config, ranks, "--ep_size", size)
    assert "Continuing from" in done.output
    folder = tmp_path / "run"
    assert hash_of_state(folder, 20) == hash_of_state(whole, 20)
    saved = "model.safetensors"
    assert (folder / saved).read_bytes() == (whole / saved).read_bytes()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("ep", 2, "--ep_size", 2), ("fsdp2_full_shard", 2)),
        (("fsdp2_full_shard", 2), ("fsdp2_ep", 4, "--ep_size", 2)),
    ],
)
def test_a_run_goes_on_with_and_without_spread_experts(first, then, trained, mixture, tmp_path):
    go_on(trained(*first), tmp_path / "run", mixture, *then)
    assert_agrees(tmp_path / "run", trained("single", 1))


def go_on(run, folder, mixture, *how):
    """Continue a run from its step 10 in a folder of its own, and return how it ended."""
    folder.mkdir()
    shutil.copytree(run / "checkpoint-10", folder / "checkpoint-10")
    shutil.copy(run / "metrics.jsonl", folder)
    config, ranks, *flags = how
    done = train(mixture, config, ranks, folder, *flags)
    assert done.returncode == 0, done.output[-3000:]
    return done


# ---- What the libraries do by themselves ----
@pytest.fixture
def folder(tmp_path):
    """A folder with a mixture of 2 experts."""
    config = mixture_of_two()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def spread(folder):
    """An Accelerator of two ranks that share experts, and the mixture as they load it."""
    args = parse_arguments(mixtral.Arguments, words=["--ep_size", "2", "--report_to", "none"])
    accelerator = new_accelerator(args)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return accelerator, load_pretrained(AutoModelForCausalLM, accelerator, folder, **options)


def error_of(function, *args):
    """The first words of the error that a function ends with, "" if it ends without."""
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_each_rank_has_its_own_experts_and_one_kernel_updates_them(folder):
    def parts():
        _, model = spread(folder)
        (experts,) = modules_of_experts(model)
        groups = make_adamw(model, TrainingArguments()).param_groups
        return (
            list(experts.gate_up_proj.to_local().shape),
            list(experts.gate_up_proj.shape),
            [
                len({hasattr(weight, "device_mesh") for weight in group["params"]})
                for group in groups
            ],
        )

    assert on_ranks(parts, 2) == [([1, 16, 16], [2, 16, 16], [1, 1, 1])] * 2


@shows_harm_without("ddp_takes_split_weights")
def test_accelerate_refuses_split_weights_under_ddp(cured, folder):
    def prepare():
        accelerator, model = spread(folder)
        if cured:
            return error_of(accelerator.prepare_model, model)
        return error_of(Accelerator.prepare_model, accelerator, model)

    found = on_ranks(prepare, 2, **AS_ON_GPUS)
    assert all(error == "" if cured else "incompatible with DDP" in error for error in found)


@shows_harm_without("leave_experts_out_of_ddp")
def test_ddp_takes_the_experts_of_rank_0_for_those_of_all(cured, folder):
    def prepare():
        _, model = spread(folder)
        (experts,) = modules_of_experts(model)
        own = experts.down_proj.to_local().detach().clone()
        if cured:
            upstream.leave_experts_out_of_ddp(model)
        error = error_of(DistributedDataParallel, model)
        return error == "" and torch.equal(experts.down_proj.to_local(), own)

    assert all(on_ranks(prepare, 2)) == cured


@shows_harm_without("spreading_experts_over")
def test_transformers_shards_what_it_does_not_spread(cured, folder):
    def load():
        from transformers.distributed import DistributedConfig

        if cured:
            _, model = spread(folder)
        else:
            config = DistributedConfig(fsdp_size=2, ep_size=2)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        return hasattr(model.lm_head.weight, "device_mesh")

    assert on_ranks(load, 2) == [not cured] * 2
