# SPDX-License-Identifier: Apache-2.0
"""A test of the tests: each fault that users meet, planted in a copy of the repository, is found by
a check.

A fault is a change of a few words. The check is one that the project has anyway, run as it always
is, and it has to fail for the fault's own reason: that assertion, that number out of bounds, that
line of the report.
"""

import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from textwrap import indent

import pytest

from launching import REPO, run
from proof.jobs import PACKING, Run, all_runs, reference_of, run_on_mesh
from proof.launch import launch
from proof.parity_table import measure
from proof.trials.outcome import unequal
from tiny import makers

COPIED = ["accelerate_configs", "recipes", "scripts", "tests", "pyproject.toml", "requirements.txt"]
RECIPE, MASK_PROBE = "recipes/llama.py", "tests/mask_probe.py"
# Each FSDP ignores the other's key and shards in full
FSDP1_NO_SHARD = (
    "accelerate_configs/fsdp1_no_shard.yaml",
    "fsdp_sharding_strategy: NO_SHARD",
    "fsdp_reshard_after_forward: NO_SHARD",
)
FSDP2_NO_SHARD = (
    "accelerate_configs/fsdp2_full_shard.yaml",
    "fsdp_reshard_after_forward: true",
    "fsdp_sharding_strategy: NO_SHARD",
)

# ---- Faults that a test finds: the test, what its assertion says, and the fault ----
# A fault is (file, old text, new text).
COLLECTIVES = (
    "tests/unit/test_recipes.py::TestEachFile::test_every_rank_takes_part_in_every_collective_call"
)
SHARDING_KEY = (
    "tests/unit/configs/test_shipped_yamls.py"
    "::TestConfig::test_it_uses_the_sharding_key_of_its_version"
)
PACKED = "tests/unit/test_masks.py::test_packed_documents_do_not_see_each_other[llama-sdpa]"
LAID_OUT = (
    "tests/unit/test_masks.py"
    "::test_a_batch_of_the_recipe_keeps_rows_and_padding_apart[llama-sdpa-packed]"
)
END_OF_TURN = (
    "tests/unit/components/test_chat.py"
    "::test_an_end_of_turn_is_trained_on_where_it_is_the_pad_token_too"
)
PIPELINES = (
    "tests/unit/components/test_mesh.py"
    "::test_the_size_of_pipelines_is_known_with_and_without_sizes_in_the_yaml[None]"
)
TRAINED = "tests/unit/test_adapters.py::test_exactly_what_should_train_is_trained[--use_peft]"
BESIDE_A_SAVE = "tests/launch/test_fault_tolerance.py::test_steps_beside_a_save_change_no_bit_of_it"
COMPONENTS = "recipes/components"
SAVE = """    save_model(
        accelerator,
        model,
        tokenizer,
        args.output_dir,
        stop_tokens=stop_tokens_of_turns(tokenizer),
    )
"""
GATHER = "    share = gather_share(accelerator, model, unwrapped)\n"
FOUND_BY_A_TEST = {
    "only rank 0 saves": (
        f"{COLLECTIVES}[llama.py]",
        "save_model on some ranks only",
        RECIPE,
        SAVE,
        f"    if accelerator.is_main_process:\n{indent(SAVE, ' ' * 4)}",
    ),
    "only rank 0 gathers what it saves": (
        f"{COLLECTIVES}[export.py]",
        "gather_share on some ranks only",
        f"{COMPONENTS}/export.py",
        GATHER,
        GATHER.replace("\n", " if accelerator.process_index == 0 else None\n"),
    ),
    "the other ranks leave before the save": (
        f"{COLLECTIVES}[export.py]",
        "some ranks leave before the others",
        f"{COMPONENTS}/export.py",
        GATHER,
        f"    if not accelerator.is_main_process:\n        return\n{GATHER}",
    ),
    "a save in the background of what later steps change": (
        f"{BESIDE_A_SAVE}[single-1]",
        r"assert \{20: .* == \{20: ",
        f"{COMPONENTS}/run.py",
        "copy=in_background",
        "copy=False",
    ),
    "NO_SHARD of FSDP1 that is full shard": (
        f"{SHARDING_KEY}[fsdp1_no_shard]",
        r"assert \('fsdp_sharding_strategy' in",
        *FSDP1_NO_SHARD,
    ),
    "NO_SHARD of FSDP2 that is full shard": (
        f"{SHARDING_KEY}[fsdp2_full_shard]",
        r"assert \('fsdp_sharding_strategy' in",
        *FSDP2_NO_SHARD,
    ),
    "packed rows whose positions run on": (
        LAID_OUT,
        r"assert 0\.\d+ == 0",
        f"{COMPONENTS}/packing.py",
        'inputs["position_ids"] = torch.from_numpy(positions)',
        'inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)',
    ),
    "an all-ones mask under packing": (
        PACKED,
        r"assert 0\.\d+ == 0",
        MASK_PROBE,
        '"use_cache": False}',
        '"use_cache": False, "attention_mask": torch.ones_like(owners)}',
    ),
    "an end of turn that is not trained on where it is the pad token too": (
        END_OF_TURN,
        r"assert -100 == ",
        f"{COMPONENTS}/chat.py",
        "labels[inside] = tokens[inside]",
        "labels[inside] = [token if token != template.tokenizer.pad_token_id else NOT_TRAINED_ON "
        "for token in tokens[inside]]",
    ),
    "rows of its own for each rank of a pipeline": (
        PIPELINES,
        r"assert \(2, 2, 3\) == \(2, 2, 1\)",
        f"{COMPONENTS}/mesh.py",
        "return self.rank % self.data_ranks",
        "return self.rank // self.copies",
    ),
    "adapters that are frozen": (
        TRAINED,
        "lora_A",
        RECIPE,
        'task_type="CAUSAL_LM")',
        'task_type="CAUSAL_LM", inference_mode=True)',
    ),
    "adapters that the optimizer does not know": (
        TRAINED,
        "lora_B",
        f"{COMPONENTS}/optimizer.py",
        "if not weight.requires_grad:",
        'if not weight.requires_grad or "lora_B" in name:',
    ),
}

# ---- Faults that evidence/parity.py finds: the run, the number out of bounds, and the fault ----
SHORT = ("--max_steps", "2")
ONE_PROCESS = Run("strategies", "single")
OTHER_CUT = Run("cuts", "single", batch=1, accumulation=12)
TWO_RANKS = Run("strategies", "ddp", ranks=2, accumulation=2)
LOSS = "token_loss(model, part) / num_trained_on"
OWN_COUNT = 'batch["counts"][0] / args.gradient_accumulation_steps / accelerator.num_processes'
PAD = "labels = np.full(shape, NOT_TRAINED_ON)"
APPLIED = "optimizer_step_was_skipped:\n            self._schedule.step()"
FOUND_BY_PARITY = {
    "a mean of means": (
        OTHER_CUT,
        "loss",
        RECIPE,
        LOSS,
        f"token_loss(model, part) / {OWN_COUNT}",
    ),
    "a pad token that is trained on": (
        OTHER_CUT,
        "loss",
        f"{COMPONENTS}/packing.py",
        PAD,
        PAD.replace("NOT_TRAINED_ON", "self.pad_token_id"),
    ),
    "a schedule that steps once per process": (
        TWO_RANKS,
        "learning_rate",
        f"{COMPONENTS}/optimizer.py",
        APPLIED,
        APPLIED.replace(
            "self._schedule.step()",
            "for _ in range(self._accelerator.num_processes): self._schedule.step()",
        ),
    ),
}

# ---- The same of ranks that share rows ----
MESH = f"{COMPONENTS}/mesh.py"
ULYSSES = run_on_mesh("deepspeed_ulysses", 2)
SHARED_LINES = run_on_mesh("deepspeed_ulysses", 2, flags=PACKING)
SPLIT_ROWS = run_on_mesh("fsdp2_cp", 4)
SUMMED_ONCE = "divided(accelerator.reduce(value), Mesh.of(accelerator).copies)"
POSITIONS = 'batch["inputs"] | part["inputs"] | {"position_ids": positions}'
NEXT_TOKENS = 'targets.view(-1)[batch["positions"]] = batch["targets"]'
OWN_PART = "    trained_on = (targets.flatten() != NOT_TRAINED_ON).nonzero()[:, 0]\n"
FOUND_BY_PARITY_OF_MESHES = {
    "tokens that count once for each rank that shares their row": (
        ULYSSES,
        "loss",
        MESH,
        SUMMED_ONCE,
        "accelerator.reduce(value)",
    ),
    "a mean of the means of parts of rows": (
        ULYSSES,
        "loss",
        RECIPE,
        "token_loss(model, part) / num_trained_on",
        'token_loss(model, part) / max(len(part["targets"]), 1)'
        " / args.gradient_accumulation_steps / accelerator.num_processes",
    ),
    "parts of rows that all begin at position 0": (
        ULYSSES,
        "loss",
        MESH,
        POSITIONS,
        '{"input_ids": cut(ids)}',
    ),
    "targets that are not shifted before a row is cut": (
        SPLIT_ROWS,
        "loss",
        MESH,
        NEXT_TOKENS,
        NEXT_TOKENS.replace('batch["positions"]', 'batch["positions"] + 1'),
    ),
    "targets that are shifted after a row is cut": (
        ULYSSES,
        "loss",
        MESH,
        OWN_PART,
        f"    targets[:, -1] = NOT_TRAINED_ON\n{OWN_PART}",
    ),
}


def in_groups(config, ranks, *flags):
    """The run of evidence/parity.py in groups of two ranks, --ep_size or --pp_size, and flags."""
    size, *more = flags
    wanted = (config, ranks, (size, "2", *more))
    return next(run for run in all_runs() if (run.config, run.ranks, run.flags) == wanted)


# ---- Faults that a run finds in its first step: the run, what it says, and the fault ----
AVERAGED = "return self.data_ranks * self.cp * self.sp"
AVERAGED_BY_ZERO2 = "if zero_stage in (1, 2):\n            return self.data_ranks\n"
PARTS = "num_parts = accelerator.gradient_accumulation_steps * averaged"
START = "    accelerator = make_accelerator(args)\n"
SPLIT = "    split_adapters(model, accelerator)\n"
HALF = r"norm\.weight with 0\.5 times its gradient"
DOUBLE = r"norm\.weight with 2 times its gradient"
EXPERTS = f"{COMPONENTS}/experts.py"
PIPELINE = f"{COMPONENTS}/pipeline.py"
OF_EXPERTS = r"experts\.down_proj with 2 times its gradient"
OF_A_LAYER = r"layernorm\.weight with 0\.5 times its gradient"
# The sum over the ranks is right, and no rank has it
OF_OWN_PIPELINE = r"layernorm\.weight with [\d.]+ times its gradient \(difference [1-9]\d+\.\d%\)"
OF_OWN_RANK = r"lora_B\S* with [\d.]+ times its gradient \(difference [1-9]\d+\.\d%\)"
FOUND_BY_THE_RUN = {
    "a missing factor of the world size under DDP": (
        TWO_RANKS,
        HALF,
        MESH,
        AVERAGED,
        "return 1",
    ),
    "a missing factor of the micro-batches": (
        TWO_RANKS,
        HALF,
        f"{COMPONENTS}/strategy.py",
        PARTS,
        "num_parts = averaged",
    ),
    "a missing factor of the world size under FSDP2": (
        replace(TWO_RANKS, config="fsdp2_full_shard"),
        HALF,
        MESH,
        AVERAGED,
        "return 1",
    ),
    "a factor that ZeRO-2 does not divide by": (
        replace(TWO_RANKS, config="deepspeed_zero2"),
        DOUBLE,
        MESH,
        AVERAGED_BY_ZERO2,
        AVERAGED_BY_ZERO2.replace("self.data_ranks", "2 * self.data_ranks"),
    ),
    "gradients that are averaged over too few ranks": (
        ULYSSES,
        HALF,
        MESH,
        AVERAGED,
        "return self.data_ranks",
    ),
    "adapters that DDP leaves out": (
        replace(TWO_RANKS, weights="LoRA"),
        OF_OWN_RANK,
        f"{COMPONENTS}/model.py",
        SPLIT,
        f"{SPLIT}    model._ddp_params_and_buffers_to_ignore = "
        "[name for name, _ in model.named_parameters() if 'lora_B' in name]\n",
    ),
    "adapters that FSDP2 leaves out": (
        replace(TWO_RANKS, config="fsdp2_full_shard", weights="LoRA"),
        OF_OWN_RANK,
        RECIPE,
        START,
        f"{START}    accelerator.state.fsdp_plugin.ignored_modules = r'.*\\.lora_[AB]\\.default'\n",
    ),
    "experts that are averaged over the ranks with copies of them": (
        in_groups("ep", 2, "--ep_size"),
        OF_EXPERTS,
        EXPERTS,
        "num_ranks = torch.distributed.get_world_size()",
        "num_ranks = copies.size()",
    ),
    "sharded experts that are averaged over the ranks with copies of them": (
        in_groups("fsdp2_ep", 4, "--ep_size"),
        OF_EXPERTS,
        EXPERTS,
        "unit.set_gradient_divide_factor(float(mesh.size()))",
        "unit.set_gradient_divide_factor(float(mesh[COPIES].size()))",
    ),
    "replicas of a pipeline that keep their own gradients": (
        in_groups("pp", 4, "--pp_size"),
        OF_OWN_PIPELINE,
        PIPELINE,
        "if self.mesh.num_pipelines > 1 and not self._is_sharded:",
        "if self.mesh.num_pipelines > 2 and not self._is_sharded:",
    ),
    "a missing factor of the pipelines that shard stages": (
        in_groups("pp", 4, "--pp_size", "--shard_stages"),
        OF_A_LAYER,
        PIPELINE,
        "self._averaged = mesh.num_pipelines if self._is_sharded else 1",
        "self._averaged = 1",
    ),
}
# evidence/parity.py compares neither evaluations nor dropout
FOUND_BY_A_TEST_OF_MESHES = {
    "an evaluation under sequence parallelism of parts of rows": (
        "test_a_mesh_gives_the_numbers_of_one_process[deepspeed_ulysses-full]",
        r"assert 0\.\d+ <= 1e-06",
        MESH,
        "return self.cp * (self.sp if is_training else 1)",
        "return self.cp * self.sp",
    ),
    "dropout of a rank's own where matrices are shared": (
        "test_ranks_that_share_matrices_drop_the_same_and_others_something_else",
        r"assert \(\[",
        f"{COMPONENTS}/run.py",
        "place = (self._args.seed, step, self._mesh.token_rank)",
        "place = (self._args.seed, step, self._mesh.rank)",
    ),
    "adapters of split matrices that drop the same places on each rank": (
        "test_adapters_that_are_split_drop_what_one_process_drops",
        r"AssertionError: \{'loss': ",
        f"{COMPONENTS}/split_adapters.py",
        "mask.chunk(self.parts, -1)[self.part]",
        "mask.chunk(self.parts, -1)[0]",
    ),
}


@pytest.fixture
def copy(tmp_path):
    """A function that copies the repository, plants faults in the copy and returns its folder."""

    def copy_with(*faults):
        folder = tmp_path / "copy"
        folder.mkdir()
        for path in (REPO / name for name in COPIED):
            if path.is_dir():
                shutil.copytree(
                    path,
                    folder / path.name,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy(path, folder)
        for name, old, new in faults:
            text = (folder / name).read_text()
            assert text.count(old) == 1, (
                f"adapt this fault to {name}, which has {old!r} {text.count(old)} times"
            )
            (folder / name).write_text(text.replace(old, new))
        return folder

    return copy_with


def run_test(test, folder, tmp_path):
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--basetemp", tmp_path / "pytest"]
    return run(sys.executable, "-m", "pytest", *options, test, cwd=folder)


@pytest.mark.parametrize("fault", FOUND_BY_A_TEST)
def test_a_test_finds(fault, copy, tmp_path):
    test, says, *change = FOUND_BY_A_TEST[fault]
    done = run_test(test, copy(change), tmp_path)
    assert done.returncode == 1 and "1 failed" in done.output, (
        done.output
    )  # other codes: it did not run
    assert re.search(f"^E .*{says}", done.output, re.MULTILINE), done.output


def test_no_test_fails_without_a_fault(copy, tmp_path):
    done = run_test(f"{COLLECTIVES}[llama.py]", copy(), tmp_path)
    assert done.returncode == 0 and "1 passed" in done.output, done.output


def row_of(planned, folder, tiny, output_dir, reference):
    """The row of evidence/parity.py for one of its runs in the copy, cut to two steps."""
    assert planned in all_runs()
    short = replace(planned, flags=(*planned.flags, *SHORT))
    row = measure(short, tiny, output_dir, reference, root=folder)
    assert "differences" in row, row
    return row


@pytest.fixture(scope="module")
def sound(tiny, once):
    """The output folder of one process without a fault."""
    return once("sound", lambda folder: row_of(ONE_PROCESS, REPO, tiny, folder, folder))


@pytest.fixture(scope="module")
def tiny_of_meshes(once):
    """The folder of the tiny language model that meshes train."""
    maker, *shape = ULYSSES.maker
    return once(ULYSSES.tiny, partial(makers.make, maker, words=shape))


@pytest.fixture(scope="module")
def sound_of_meshes(tiny_of_meshes, once):
    """The output folder of its run in one process without a fault."""
    planned = reference_of(ULYSSES)
    return once(
        "sound_of_meshes", lambda folder: row_of(planned, REPO, tiny_of_meshes, folder, folder)
    )


@pytest.mark.parametrize("fault", FOUND_BY_PARITY)
def test_parity_finds(fault, copy, sound, tiny, tmp_path):
    planned, number, *change = FOUND_BY_PARITY[fault]
    folder, reference = copy(change), sound
    if planned.ranks == 1:  # then the reference has the fault as well
        reference = tmp_path / "reference"
        row_of(ONE_PROCESS, folder, tiny, reference, reference)
    row = row_of(planned, folder, tiny, tmp_path / "run", reference)
    assert row["verdict"] == "OUT OF BOUNDS" and row["bytes"] == "ok"
    assert row["differences"][number] > 1e-3, row  # a thousand times the bound, not rounding


@pytest.mark.parametrize("fault", FOUND_BY_PARITY_OF_MESHES)
def test_parity_of_meshes_finds(fault, copy, sound_of_meshes, tiny_of_meshes, tmp_path):
    planned, number, *change = FOUND_BY_PARITY_OF_MESHES[fault]
    row = row_of(planned, copy(change), tiny_of_meshes, tmp_path / "run", sound_of_meshes)
    assert row["verdict"] == "OUT OF BOUNDS" and row["bytes"] == "ok"
    assert row["differences"][number] > 1e-3, row  # a thousand times the bound, not rounding


def test_parity_finds_rows_of_a_shared_line_that_see_each_other(copy, tiny_of_meshes, tmp_path):
    reference = tmp_path / "reference"
    row_of(reference_of(SHARED_LINES), REPO, tiny_of_meshes, reference, reference)
    row = row_of(SHARED_LINES, REPO, tiny_of_meshes, tmp_path / "sound", reference)
    assert row["verdict"] == "ok", row
    faulty = copy((MESH, '"row_lengths": batch["row_lengths"]', ""))
    row = row_of(SHARED_LINES, faulty, tiny_of_meshes, tmp_path / "faulty", reference)
    assert row["verdict"] == "OUT OF BOUNDS" and row["bytes"] == "ok"
    assert row["differences"]["loss"] > 1e-3, row


@pytest.fixture
def model_of(tiny, once):
    """A function from a run to the folder of its tiny model."""

    def folder_of(planned):
        if planned.group != "meshes":
            return tiny
        maker, *shape = planned.maker
        return once(planned.tiny, partial(makers.make, maker, words=shape))

    return folder_of


@pytest.mark.parametrize("fault", FOUND_BY_THE_RUN)
def test_the_run_finds(fault, copy, model_of, tmp_path):
    planned, says, *change = FOUND_BY_THE_RUN[fault]
    model = model_of(planned)
    run_folder = tmp_path / "run"
    short = replace(planned, flags=(*planned.flags, *SHORT))
    code, output = launch(short, model, run_folder, root=copy(change))
    assert code == 76, output
    assert re.search(says, output) and "Traceback" not in output, output
    assert not list(run_folder.glob("checkpoint-*")) and not (run_folder / "config.json").exists()


PROBES = (
    "accelerator.gradient_probe = GradientProbe(accelerator, model, optimizer, self._end)",
    "accelerator.pipeline_probe = PipelineProbe(accelerator, model, self._end)",
)
PROBED = [
    *(
        replace(TWO_RANKS, config=config)
        for config in ("ddp", "fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero2")
    ),
    in_groups("ep", 2, "--ep_size"),
    in_groups("pp", 2, "--pp_size"),
]


@pytest.mark.parametrize("planned", PROBED, ids=lambda planned: planned.config)
def test_what_finds_them_changes_no_bit(planned, copy, model_of, tmp_path):
    without = copy(*[(f"{COMPONENTS}/run.py", probe, "pass") for probe in PROBES])
    short = replace(planned, flags=(*planned.flags, *SHORT))
    for root, name in ((REPO, "with"), (without, "without")):
        code, output = launch(short, model_of(planned), tmp_path / name, root=root)
        assert code == 0, output
    assert unequal(tmp_path / "with", tmp_path / "without") == 0


@pytest.mark.parametrize("fault", FOUND_BY_A_TEST_OF_MESHES)
def test_a_test_of_meshes_finds(fault, copy, tmp_path):
    test, says, *change = FOUND_BY_A_TEST_OF_MESHES[fault]
    done = run_test(f"tests/launch/test_meshes.py::{test}", copy(change), tmp_path)
    assert done.returncode == 1 and "1 failed" in done.output, done.output
    assert re.search(f"^E .*{says}", done.output, re.MULTILINE), done.output


@pytest.mark.parametrize("planned", [ULYSSES, SPLIT_ROWS], ids=lambda planned: planned.config)
def test_parity_of_meshes_finds_nothing_without_a_fault(
    planned, copy, sound_of_meshes, tiny_of_meshes, tmp_path
):
    row = row_of(planned, copy(), tiny_of_meshes, tmp_path / "run", sound_of_meshes)
    assert row["verdict"] == "ok", row


def test_parity_finds_nothing_without_a_fault(copy, sound, tiny, tmp_path):
    row = row_of(OTHER_CUT, copy(), tiny, tmp_path / "run", sound)
    assert row["verdict"] == "ok", row


@pytest.mark.parametrize(
    ("config", "change", "ignored"),
    [
        ("fsdp1_no_shard", FSDP1_NO_SHARD, "fsdp_reshard_after_forward"),
        ("fsdp2_full_shard", FSDP2_NO_SHARD, "fsdp_sharding_strategy"),
    ],
    ids=["fsdp1", "fsdp2"],
)
def test_the_rehearsal_refuses_NO_SHARD_that_is_full_shard(
    config, change, ignored, copy, tiny, tmp_path
):
    planned = Run("strategies", config, ranks=2, accumulation=2)
    code, output = launch(planned, tiny, tmp_path / "run", root=copy(change))
    assert code == 64 and ignored in output, output


def test_the_shard_report_finds_NO_SHARD_that_is_full_shard(copy, tiny, tmp_path):
    start = "    accelerator = make_accelerator(args)\n"
    lost = (
        RECIPE,
        start,
        f'    __import__("os").environ.pop("FSDP_SHARDING_STRATEGY")  # of the YAML\n{start}',
    )
    planned = Run("strategies", "fsdp1_no_shard", ranks=2, accumulation=2, flags=SHORT)
    code, output = launch(planned, tiny, tmp_path / "run", root=copy(lost))
    assert code == 78 and "shard report: NOT AS PROMISED" in output, output
