# SPDX-License-Identifier: Apache-2.0
"""Every YAML with every kind of weights: it gives one process's loss and a result that loads, or it
refuses.

The whole table is here; a pair that is missing fails `test_the_table_is_complete`. Most of it is
run here, all of it by evidence/parity.py (results/README.md).
"""

import json

import pytest

from launching import CONFIGS, read_metrics
from proof import jobs
from proof.compare import bounds_of, compare, within
from proof.launch import launch
from saved_models import loss_of_saved
from short_jobs import NO_INT8_FSDP, STEPS, WORKS, short_run

TABLE = {  # strategy: what happens with full, LoRA, int8 LoRA, nf4 LoRA
    "single": (WORKS, WORKS, WORKS, WORKS),
    "ddp": (WORKS, WORKS, WORKS, WORKS),
    "fsdp1_full_shard": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "fsdp1_shard_grad_op": (
        WORKS,
        WORKS,
        NO_INT8_FSDP,
        "use fsdp2_shard_grad_op.yaml or fsdp1_full_shard.yaml",
    ),
    "fsdp1_no_shard": (WORKS, "use ddp.yaml", NO_INT8_FSDP, "use ddp.yaml"),
    "fsdp1_hybrid_shard": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "fsdp2_full_shard": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "fsdp2_shard_grad_op": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "fsdp2_hybrid_shard": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "fsdp2_cpu_offload": (WORKS, WORKS, NO_INT8_FSDP, WORKS),
    "deepspeed_zero0": (WORKS, WORKS, WORKS, WORKS),
    "deepspeed_zero1": (WORKS, WORKS, WORKS, WORKS),
    "deepspeed_zero2": (WORKS, WORKS, WORKS, WORKS),
    "deepspeed_zero2_offload": (WORKS, WORKS, WORKS, WORKS),
    "deepspeed_zero3": (WORKS, WORKS, WORKS, WORKS),
    "deepspeed_zero3_offload": (WORKS, WORKS, WORKS, WORKS),
}
PAIRS = [
    (config, kind, row[i]) for config, row in TABLE.items() for i, kind in enumerate(jobs.WEIGHTS)
]
# Run here: full weights everywhere, adapters but where a sibling stands for it, a quantized base
# under each engine, each refusal once
HAS_SIBLING = ("hybrid_shard", "offload")
SHORT_FORM = [
    (config, kind, expected)
    for config, kind, expected in PAIRS
    if expected == WORKS
    and (
        kind == "full"
        or config in jobs.ENGINES
        or kind == "LoRA"
        and not config.endswith(HAS_SIBLING)
    )
]
SHORT_FORM += {
    expected: (config, kind, expected) for config, kind, expected in PAIRS if expected != WORKS
}.values()
# An int8 base rounds its activations when it evaluates, and a last bit can tip one over
EVAL = {"full": 1e-6, "LoRA": 1e-6, "nf4 LoRA": 1e-6, "int8 LoRA": 1e-4}
SAVED = {
    "full": 1e-5,
    "LoRA": 1e-5,
    "nf4 LoRA": 1e-5,
    "int8 LoRA": 1e-3,
}  # evaluated again without padding


def test_the_table_is_complete():
    # A copy, the one of pipelines (test_pipeline.py), and those of meshes (test_meshes.py)
    of_others = {"fsdp", "pp", *jobs.mesh_configs(), *jobs.expert_configs()}
    assert set(TABLE) == {path.stem for path in CONFIGS.glob("*.yaml")} - of_others
    assert set(TABLE) == set(jobs.configs())
    assert all(len(row) == len(jobs.WEIGHTS) for row in TABLE.values()) and len(PAIRS) == 64
    refused = [
        (run.config, run.weights)
        for run in jobs.all_runs()
        if jobs.is_refused(run) and run.recipe == "llama" and run.group != "meshes"
    ]
    assert set(refused) == {(config, kind) for config, kind, expected in PAIRS if expected != WORKS}


@pytest.mark.parametrize(
    ("config", "kind", "expected"), SHORT_FORM, ids=[f"{c}-{k}" for c, k, _ in SHORT_FORM]
)
def test_a_strategy_with_a_kind_of_weights(
    config, kind, expected, short_of, short_in_one_process, short_under, tmp_path
):
    run = short_run(config, kind)
    tiny = short_of("llama")
    if expected != WORKS:
        code, output = launch(run, tiny, tmp_path / "run")
        assert code == 64, output[-3000:]
        assert expected in output and "Traceback" not in output
        assert "Loading weights" not in output  # refused before the model loads
        return

    folder = short_under(config, kind)  # exported too, by test_export.py
    whole = short_in_one_process(kind)
    report = json.loads((folder / "report.json").read_text())
    assert (
        report["verdict"] == "ok" and len(report["rows"]) >= 3 * run.ranks
    )  # held bytes are the promised bytes
    found, (bounds, _) = compare(folder, whole), bounds_of(run)
    assert within(found, bounds), found
    steps, evaluations = read_metrics(folder)
    reference, reference_evaluations = read_metrics(whole)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["num_input_tokens_seen"] for line in steps] == [
        line["num_input_tokens_seen"] for line in reference
    ]
    assert evaluations[-1]["eval_loss"] == pytest.approx(
        reference_evaluations[-1]["eval_loss"], rel=EVAL[kind]
    )
    assert loss_of_saved(folder, kind, tiny) == pytest.approx(
        evaluations[-1]["eval_loss"], rel=SAVED[kind]
    )
    assert json.loads((folder / "run.json").read_text())["arguments"]["seed"] == 42
