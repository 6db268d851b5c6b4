"""A test of the tests: each fault that users meet, planted in a copy of the repository, is found.

A fault is a change of a few words. What finds it is a check that the project has anyway, run as it
always is, and it has to fail for the fault's own reason: that assertion, that number out of bounds,
that line of the report.
"""

import re
import shutil
import sys
from dataclasses import dataclass, replace

import pytest
from launching import REPO, run
from proof.jobs import Run, all_runs
from proof.launch import launch
from proof.parity_table import measure

COPIED = ["accelerate_configs", "recipes", "scripts", "tests", "pyproject.toml", "requirements.txt"]
RECIPE = "recipes/llama.py"
MASK_PROBE = "tests/mask_probe.py"


@dataclass(frozen=True)
class Change:
    """A fault: some text of a file and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class FoundByTest:
    """A fault, the test that finds it, and what its assertion says (a regular expression)."""

    test: str
    says: str
    change: Change


@dataclass(frozen=True)
class FoundByParity:
    """A fault, the run of scripts/parity.py that finds it, and the number out of bounds."""

    run: Run
    number: str
    change: Change


def in_recipe(old, new):
    return Change(RECIPE, old, new)


# Each FSDP ignores the other's key and shards in full
FSDP1_NO_SHARD = Change(
    "accelerate_configs/fsdp1_no_shard.yaml",
    "fsdp_sharding_strategy: NO_SHARD",
    "fsdp_reshard_after_forward: NO_SHARD",
)
FSDP2_NO_SHARD = Change(
    "accelerate_configs/fsdp2_full_shard.yaml",
    "fsdp_reshard_after_forward: true",
    "fsdp_sharding_strategy: NO_SHARD",
)

# ---- Faults that a test finds ----
COLLECTIVES = (
    "tests/unit/test_recipes.py::TestRecipe::"
    "test_every_rank_takes_part_in_every_collective_call[llama.py]"
)
SHARDING_KEY = (
    "tests/unit/test_configs.py::TestConfig::test_it_uses_the_sharding_key_of_its_version"
)
WRONG_KEY = r"assert \('fsdp_sharding_strategy' in"
MASKS = "tests/unit/test_masks.py::"
PACKED = f"{MASKS}test_packed_documents_do_not_see_each_other[llama-sdpa]"
LAID_OUT = f"{MASKS}test_a_batch_of_the_recipe_keeps_rows_and_padding_apart[llama-sdpa-packed]"
LEAK = r"assert 0\.\d+ == 0"
END_OF_TURN = "tests/unit/test_rows.py::test_a_pad_token_equal_to_the_end_of_turn_does_no_harm"
TRAINED = "tests/unit/test_adapters.py::test_exactly_what_should_train_is_trained[--use_peft]"
EXPORT = "    export_model(accelerator, model, tokenizer, output_dir)\n"
GATHER = "        weights = model_weights.whole_weights(accelerator, model)\n"
FOUND_BY_A_TEST = {}
FOUND_BY_A_TEST["rank 0 alone saves"] = FoundByTest(
    COLLECTIVES,
    "export_model on some ranks alone",
    in_recipe(EXPORT, f"    if accelerator.is_main_process:\n    {EXPORT}"),
)
FOUND_BY_A_TEST["rank 0 alone gathers what it saves"] = FoundByTest(
    COLLECTIVES,
    "whole_weights on some ranks alone",
    in_recipe(GATHER, GATHER.replace("\n", " if accelerator.process_index == 0 else None\n")),
)
FOUND_BY_A_TEST["the other ranks leave before the save"] = FoundByTest(
    COLLECTIVES,
    "some ranks leave before the others",
    in_recipe(GATHER, f"        if not accelerator.is_main_process:\n            return\n{GATHER}"),
)
FOUND_BY_A_TEST["NO_SHARD of FSDP1 that is full shard"] = FoundByTest(
    f"{SHARDING_KEY}[fsdp1_no_shard]", WRONG_KEY, FSDP1_NO_SHARD
)
FOUND_BY_A_TEST["NO_SHARD of FSDP2 that is full shard"] = FoundByTest(
    f"{SHARDING_KEY}[fsdp2_full_shard]", WRONG_KEY, FSDP2_NO_SHARD
)
FOUND_BY_A_TEST["packed rows whose positions run on"] = FoundByTest(
    LAID_OUT,
    LEAK,
    in_recipe(
        'inputs["position_ids"] = torch.from_numpy(positions)',
        'inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)',
    ),
)
FOUND_BY_A_TEST["an all-ones mask under packing"] = FoundByTest(
    PACKED,
    LEAK,
    Change(
        MASK_PROBE,
        '"use_cache": False}',
        '"use_cache": False, "attention_mask": torch.ones_like(owners)}',
    ),
)
FOUND_BY_A_TEST["an end of turn that is not learnt where it is the pad token too"] = FoundByTest(
    END_OF_TURN,
    r"assert -100 == ",
    in_recipe(
        "token if learnt[start] else -100",
        "token if learnt[start] and token != tokenizer.pad_token_id else -100",
    ),
)
FOUND_BY_A_TEST["adapters that are frozen"] = FoundByTest(
    TRAINED,
    "lora_A",
    in_recipe('task_type="CAUSAL_LM",', 'task_type="CAUSAL_LM", inference_mode=True,'),
)
FOUND_BY_A_TEST["adapters that the optimizer does not know"] = FoundByTest(
    TRAINED,
    "lora_B",
    in_recipe(
        "        if weight.requires_grad:\n            spared",
        '        if weight.requires_grad and "lora_B" not in name:\n            spared',
    ),
)

# ---- Faults that scripts/parity.py finds ----
SHORT = ("--max_steps", "2")
ONE_PROCESS = Run("strategies", "single")
OTHER_CUT = Run("cuts", "single", batch=1, accumulation=12)
TWO_RANKS = Run("strategies", "ddp", ranks=2, accumulation=2)
LOSS = "summed_loss(model, batch) / num_supervised"
COUNT = 'batch["counts"][0]'
PAD = "np.full(shape, -100)"
PREPARED = "model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)"
FOUND_BY_PARITY = {}
FOUND_BY_PARITY["a mean of means"] = FoundByParity(
    OTHER_CUT, "loss", in_recipe(LOSS, f"summed_loss(model, batch) / {COUNT} / window")
)
FOUND_BY_PARITY["a pad token that is learnt"] = FoundByParity(
    OTHER_CUT, "loss", in_recipe(PAD, PAD.replace("-100", "pad_token_id"))
)
FOUND_BY_PARITY["a missing factor of the world size"] = FoundByParity(
    TWO_RANKS,
    "grad_norm",
    in_recipe(
        "accelerator.backward(loss * (window +", "accelerator.backward(loss * (accumulation +"
    ),
)
FOUND_BY_PARITY["a schedule that steps once per process"] = FoundByParity(
    TWO_RANKS,
    "learning_rate",
    in_recipe(PREPARED, PREPARED.replace("train_loader", "train_loader, schedule")),
)


@pytest.fixture
def copy(tmp_path):
    """A function that copies the repository, plants faults in the copy and returns its folder."""

    def copy_with(*changes):
        folder = tmp_path / "copy"
        folder.mkdir()
        for name in COPIED:
            copy_to(folder, REPO / name)
        for change in changes:
            plant(folder / change.file, change)
        return folder

    return copy_with


def copy_to(folder, path):
    if path.is_dir():
        without_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, folder / path.name, symlinks=True, ignore=without_caches)
    else:
        shutil.copy(path, folder)


def plant(path, change):
    text = path.read_text()
    number = text.count(change.old)
    assert number == 1, f"adapt this fault to {path.name}, which has {change.old!r} {number} times"
    path.write_text(text.replace(change.old, change.new))


def run_test(test, folder, tmp_path):
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--basetemp", tmp_path / "pytest"]
    return run(sys.executable, "-m", "pytest", *options, test, cwd=folder)


@pytest.mark.parametrize("fault", FOUND_BY_A_TEST)
def test_a_test_finds(fault, copy, tmp_path):
    planted = FOUND_BY_A_TEST[fault]
    done = run_test(planted.test, copy(planted.change), tmp_path)
    # Other codes: it did not run
    assert done.returncode == 1 and "1 failed" in done.output, done.output
    assert re.search(f"^E .*{planted.says}", done.output, re.MULTILINE), done.output


def test_no_test_fails_without_a_fault(copy, tmp_path):
    done = run_test(COLLECTIVES, copy(), tmp_path)
    assert done.returncode == 0 and "1 passed" in done.output, done.output


def row_of(planned, folder, tiny, output_dir, reference):
    """The row of scripts/parity.py for one of its runs in the copy, cut to two steps."""
    assert planned in all_runs()
    row = measure(replace(planned, flags=SHORT), tiny, output_dir, reference, root=folder)
    assert "differences" in row, row
    return row


@pytest.fixture(scope="module")
def sound(tiny, once):
    """The output folder of one process without a fault."""
    return once("sound", lambda folder: row_of(ONE_PROCESS, REPO, tiny, folder, folder))


@pytest.mark.parametrize("fault", FOUND_BY_PARITY)
def test_parity_finds(fault, copy, sound, tiny, tmp_path):
    planted = FOUND_BY_PARITY[fault]
    folder = copy(planted.change)
    reference = sound
    if planted.run.ranks == 1:  # then the reference has the fault as well
        reference = tmp_path / "reference"
        row_of(ONE_PROCESS, folder, tiny, reference, reference)
    row = row_of(planted.run, folder, tiny, tmp_path / "run", reference)
    assert row["verdict"] == "OUT OF BOUNDS" and row["bytes"] == "ok"
    # A thousand times the bound, not rounding
    assert row["differences"][planted.number] > 1e-3, row


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
    lost = in_recipe(start, f'    os.environ.pop("FSDP_SHARDING_STRATEGY")\n{start}')
    planned = Run("strategies", "fsdp1_no_shard", ranks=2, accumulation=2, flags=SHORT)
    code, output = launch(planned, tiny, tmp_path / "run", root=copy(lost))
    assert code == 70 and "shard report: NOT AS PROMISED" in output, output
