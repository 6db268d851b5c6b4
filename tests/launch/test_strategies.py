"""Every YAML with every kind of weights gives the loss of one process and a result that loads.

Or it refuses. The whole table is here; a pair that is missing fails `test_the_table_is_complete`.
Most of it is run here, all of it by scripts/parity.py (results/README.md).
"""

import json

import llama
import pytest
import torch
from launching import CONFIGS, read_metrics
from proof import jobs
from proof.compare import bounds_of, compare, within
from proof.jobs import WEIGHTS, run_on_ranks
from proof.launch import launch

WORKS = "works"
NO_INT8_FSDP = "use --load_in_4bit, or int8 with ddp.yaml"
ALL_WORK = (WORKS, WORKS, WORKS, WORKS)
NO_INT8 = (WORKS, WORKS, NO_INT8_FSDP, WORKS)
NO_INT8_NF4 = (WORKS, WORKS, NO_INT8_FSDP, "use fsdp2_shard_grad_op.yaml or fsdp1_full_shard.yaml")
NO_ADAPTERS = (WORKS, "use ddp.yaml", NO_INT8_FSDP, "use ddp.yaml")
TABLE = {  # strategy: what happens with full, LoRA, int8 LoRA, nf4 LoRA
    "single": ALL_WORK,
    "ddp": ALL_WORK,
    "fsdp1_full_shard": NO_INT8,
    "fsdp1_shard_grad_op": NO_INT8_NF4,
    "fsdp1_no_shard": NO_ADAPTERS,
    "fsdp1_hybrid_shard": NO_INT8,
    "fsdp2_full_shard": NO_INT8,
    "fsdp2_shard_grad_op": NO_INT8,
    "fsdp2_hybrid_shard": NO_INT8,
    "fsdp2_cpu_offload": NO_INT8,
    "deepspeed_zero0": ALL_WORK,
    "deepspeed_zero1": ALL_WORK,
    "deepspeed_zero2": ALL_WORK,
    "deepspeed_zero2_offload": ALL_WORK,
    "deepspeed_zero3": ALL_WORK,
    "deepspeed_zero3_offload": ALL_WORK,
}
PAIRS = {}  # (strategy, kind of weights): what happens
for strategy, row in TABLE.items():
    for kind_of_weights, happens in zip(WEIGHTS, row, strict=True):
        PAIRS[strategy, kind_of_weights] = happens

HAS_SIBLING = ("hybrid_shard", "offload")
# Bytes depend on the ranks: some full weights are shown on 4, the rest on 2; scripts/parity.py runs
# all on both
ON_FOUR = ("fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero3")
# An int8 base rounds its activations when it evaluates, and a last bit can tip one over
EVAL = {"full": 1e-6, "LoRA": 1e-6, "nf4 LoRA": 1e-6, "int8 LoRA": 1e-4}
# Evaluated again without padding
SAVED = {"full": 1e-5, "LoRA": 1e-5, "nf4 LoRA": 1e-5, "int8 LoRA": 1e-3}


def is_run_here(config, kind):
    """Whether a pair that works is launched by these tests.

    Full weights are under every YAML, adapters except where a sibling stands for them, a quantized
    base under each engine.
    """
    if kind == "full" or config in jobs.ENGINES:
        return True
    return kind == "LoRA" and not config.endswith(HAS_SIBLING)


WORKING = [pair for pair, happens in PAIRS.items() if happens == WORKS and is_run_here(*pair)]
# One pair for each refusal: the last one of the table
REFUSED = {happens: pair for pair, happens in PAIRS.items() if happens != WORKS}


def test_the_table_is_complete():
    shipped = {path.stem for path in CONFIGS.glob("*.yaml") if not path.is_symlink()}
    assert set(TABLE) == shipped == set(jobs.configs())
    assert len(PAIRS) == 64 == len(TABLE) * len(WEIGHTS)
    runs = [run for run in jobs.all_runs() if run.recipe == "llama"]
    refused = {(run.config, run.weights) for run in runs if jobs.is_refused(run)}
    assert refused == {pair for pair, happens in PAIRS.items() if happens != WORKS}


@pytest.mark.parametrize(
    ("says", "pair"), REFUSED.items(), ids=[f"{config}-{kind}" for config, kind in REFUSED.values()]
)
def test_a_pair_that_cannot_work_is_refused_before_the_model_loads(says, pair, tiny, tmp_path):
    config, kind = pair
    run = run_on_ranks("strategies", config, jobs.ranks_of(config, 2), kind)
    assert run in jobs.all_runs()
    code, output = launch(run, tiny, tmp_path / "run")
    assert code == 64, output[-3000:]
    assert says in output and "Traceback" not in output
    assert "Loading weights" not in output


@pytest.mark.parametrize(
    ("config", "kind"), WORKING, ids=[f"{config}-{kind}" for config, kind in WORKING]
)
def test_a_strategy_with_a_kind_of_weights(config, kind, tiny, one_process, tmp_path):
    wanted = 4 if kind == "full" and config in ON_FOUR else 2
    ranks = jobs.ranks_of(config, wanted)
    run = run_on_ranks("strategies", config, ranks, kind)
    assert run in jobs.all_runs()
    whole = one_process(kind)  # which all are compared with
    folder = whole
    if config != "single":
        folder = tmp_path / "run"
        code, output = launch(run, tiny, folder)
        assert code == 0, output[-3000:]

    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "ok"  # held bytes are the promised bytes
    assert len(report["rows"]) >= 3 * ranks
    found = compare(folder, whole)
    assert within(found, bounds_of(run)[0]), found
    check_metrics(folder, whole, EVAL[kind])
    _, evaluations = read_metrics(folder)
    expected = pytest.approx(evaluations[-1]["eval_loss"], rel=SAVED[kind])
    assert loss_of_saved(folder, kind, tiny) == expected
    assert json.loads((folder / "run.json").read_text())["arguments"]["seed"] == 42


def check_metrics(folder, whole, bound):
    """The run has every step, on the same tokens, and the evaluation of the one in one process."""
    steps, evaluations = read_metrics(folder)
    expected_steps, expected_evaluations = read_metrics(whole)
    assert [line["step"] for line in steps] == list(range(1, 21))
    seen = [line["num_input_tokens_seen"] for line in steps]
    assert seen == [line["num_input_tokens_seen"] for line in expected_steps]
    expected = pytest.approx(expected_evaluations[-1]["eval_loss"], rel=bound)
    assert evaluations[-1]["eval_loss"] == expected


def loss_of_saved(output_dir, kind, tiny):
    """Load the result in this process, which did not train it; return its evaluation loss."""
    from transformers import AutoTokenizer

    model = load_saved(output_dir, kind, tiny)
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    loss = 0.0
    count = 0
    for line in (tiny / "data" / "test.jsonl").read_text().splitlines():
        row = llama.tokenize_row(json.loads(line), tokenizer, 1024)
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            loss += model(input_ids=ids, labels=labels, num_items_in_batch=1).loss.item()
        count += (labels[:, 1:] != -100).sum().item()
    return loss / count


def load_saved(output_dir, kind, tiny):
    """The model as anyone would load it: a folder of weights, or an adapter on its base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = output_dir if kind == "full" else tiny / "model"
    quantization = quantization_of(kind)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="float32", quantization_config=quantization
    )
    if kind != "full":
        model = PeftModel.from_pretrained(model, output_dir)
        weights = dict(model.named_parameters())
        trained = [weights[name].abs().sum() > 0 for name in weights if "lora_B" in name]
        assert trained and all(trained)  # the trained adapters, not new ones
    model.eval()
    assert all(not parameter.is_meta for parameter in model.parameters())
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # bitsandbytes' own bf16 path would round
    return model


def quantization_of(kind):
    """How the base of a kind of weights is quantized, None if it is not."""
    from transformers import BitsAndBytesConfig

    if kind == "int8 LoRA":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "nf4 LoRA":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="float32",
            bnb_4bit_quant_storage="float32",
        )
    return None
