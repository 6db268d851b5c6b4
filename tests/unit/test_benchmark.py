"""scripts/benchmark.py compares like with like: its gates, ratios, operation counts, commands and tables."""

import argparse
import json
import math
import sys

import pytest

import benchmark
import benchmark_peers
import benchmark_tables as tables
import llama
from launching import REPO

CELLS = [*benchmark.cpu_cells(), *benchmark.gpu_cells()]


def run_of(contestant, repeat=0, losses=(3.0, 2.0), **facts):
    """A run as scripts/benchmark.py measures it."""
    return {
        "contestant": contestant,
        "repeat": repeat,
        "losses": list(losses),
        "seconds_to_first_step": 9.0,
        "seconds_per_step": 1.0,
        "tokens_per_second": 100.0,
        "memory_mib": {"resident": 500.0},
    } | facts


def cell_of(*runs, kind="matched", name="matched, medium"):
    return {
        "cell": name,
        "kind": kind,
        "rows": "gsm8k",
        "device": "none",
        "date": "2026-01-01",
        "commit": "0",
        "versions": {},
        "warmup": 5,
        "models": {"medium": benchmark.MODELS["medium"]},
        "commands": {},
        "flags": {run["contestant"]: {"max_length": 512} for run in runs},
        "runs": tables.judge(runs, kind),
    }


def void(*runs, kind="matched", dtype="float32"):
    """Why the last run does not count."""
    return tables.judge(runs, kind, dtype)[-1]["void"]


# ---- Gates ----


def test_equal_curves_count():
    judged = tables.judge([run_of("floor"), run_of("ours", losses=(3.0, 2.0 + 9e-6))], "matched")
    assert [run["void"] for run in judged] == ["", ""]
    assert judged[1]["difference"] == pytest.approx(9e-6) and "losses" not in judged[1]


@pytest.mark.parametrize(
    "losses", [(3.0, 2.00002), (3.0, math.nan), (3.0, None), (3.0,), (3.0, 2.0, 1.0)]
)
@pytest.mark.parametrize("kind", ["matched", "start"])
def test_another_curve_voids_a_run(losses, kind):
    assert void(run_of("floor"), run_of("ours", losses=losses), kind=kind)


def test_bf16_has_a_wider_bound():
    runs = run_of("floor"), run_of("ours", losses=(3.0, 2.005))
    assert void(*runs) and not void(*runs, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["matched", "shipped"])
def test_nothing_counts_without_the_bare_loop_of_the_same_repeat(kind):
    other, own = run_of("floor", repeat=1, held_out_loss=2.0), run_of("ours", held_out_loss=2.0)
    assert void(other, own, kind=kind)
    assert void({"contestant": "floor", "repeat": 0, "failed": "killed"}, own, kind=kind)


def test_the_loss_on_held_out_rows_decides_as_shipped():
    floor = run_of("floor", held_out_loss=2.0)
    assert not void(floor, run_of("ours", losses=(9.0, None), held_out_loss=2.039), kind="shipped")
    assert "2.1%" in void(floor, run_of("ours", held_out_loss=2.042), kind="shipped")
    assert void(floor, run_of("ours", held_out_loss=math.nan), kind="shipped")


def test_growth_needs_finite_losses():
    assert not void(run_of("1"), kind="growth") and void(
        run_of("1", losses=(3.0, math.inf)), kind="growth"
    )


def test_a_run_beside_other_work_and_one_that_failed_do_not_count():
    assert void(run_of("floor"), run_of("ours", loaded=True)) == "loaded"
    assert (
        void(run_of("floor"), {"contestant": "ours", "repeat": 0, "failed": "exit code 1"})
        == "failed"
    )


# ---- Ratios ----


def test_ratios_are_those_of_a_repeat():
    """In the second repeat the machine was half as fast: a ratio of means would say 1.4."""
    seconds = {"floor": (1.0, 2.0, 1.0), "ours": (1.1, 2.2, 2.2)}
    runs = (
        run_of(name, repeat, seconds_per_step=s)
        for name in seconds
        for repeat, s in enumerate(seconds[name])
    )
    cell = cell_of(*runs)
    assert tables.paired(cell, "ours", "floor") == pytest.approx([1.1, 1.1, 2.2])
    assert tables.spread(tables.paired(cell, "ours", "floor")) == "1.10 (1.10 to 2.20)"


def test_a_repeat_counts_only_if_both_do():
    runs = [run_of(name, repeat) for repeat in range(3) for name in ("floor", "ours")]
    runs[0]["loaded"] = True  # the floor of the first repeat
    runs[3]["losses"] = [3.0, 2.1]
    assert len(tables.paired(cell_of(*runs), "ours", "floor")) == 1
    assert tables.spread([]) == ""


# ---- Operations ----


def test_the_weights_that_multiply_are_those_of_the_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in ("medium", "8B"):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**benchmark.MODELS[name]))
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        assert tables.matmul_weights(benchmark.MODELS[name]) == linear


def test_operations_a_token():
    big = benchmark.MODELS["8B"]
    weights, attention = 7_504_658_432, 12 * 32 * 4096 * 4096
    assert tables.flops_per_token(big, 4096) == 6 * weights + attention
    assert tables.flops_per_token(big, 4096, causal=True) == 6 * weights + attention / 2
    assert tables.flops_per_token(big, 4096, lora=True) == 4 * weights + attention


def test_utilisation_is_shown_in_both_conventions_where_rows_are_full():
    cell = cell_of(run_of("ours", tokens_per_second=10_000.0), kind="growth")
    cell |= {"models": {"8B": benchmark.MODELS["8B"]}, "flags": {"ours": {"max_length": 4096}}}
    cell |= {"rows": "long", "device": "NVIDIA H200"}
    table = tables.whole_table(cell)
    assert "| 52.0% | 48.8%" in table and "| 515 " in table
    assert "MFU" not in tables.whole_table(cell | {"rows": "gsm8k"})
    assert "MFU" not in tables.whole_table(cell | {"device": "a CPU"})


# ---- Tables ----


def test_a_void_row_shows_no_figure():
    runs = [
        run_of("floor"),
        run_of("ours", seconds_per_step=1.25),
        run_of("trainer", losses=(3.0, 2.1)),
    ]
    runs += [run_of("lean", seconds_per_step=0.8), run_of("trl")]
    results = {"cells": [cell_of(*runs)]}
    line = next(line for line in tables.block(results).splitlines() if "36M" in line)
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["0.800", "1.250", "void", "1.000"]
    line = next(
        line for line in tables.details(results).splitlines() if line.startswith("| trainer")
    )
    assert "loss differs by 1.0e-01" in line and "1,000" not in line


def test_the_table_of_tools_as_shipped_says_how_much_faster_ours_is():
    runs = [
        run_of("floor", held_out_loss=2.0),
        run_of("ours", held_out_loss=2.01, tokens_per_second=300.0),
        run_of("trainer", held_out_loss=2.0, tokens_per_second=200.0),
        run_of("trl", held_out_loss=3.0),
    ]
    text = tables.block({"cells": [cell_of(*runs, kind="shipped", name="shipped, medium")]})
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in text.splitlines()
        if line.startswith("|")
    }
    assert rows["Trainer"] == ["200", "1.50"] and rows["this recipe"] == ["300", ""]
    assert rows["SFTTrainer"][0].startswith("void: held-out loss differs by 50.0%")


def test_without_measurements_there_are_no_figures():
    assert tables.block(None) == "Not measured yet."


def test_the_file_of_results_has_a_line_a_run():
    cells = [cell_of(run_of("floor"), run_of("ours")), cell_of(run_of("floor"), name="another")]
    text = tables.as_text(cells)
    assert json.loads(text) == {"cells": cells} and len(text.splitlines()) == 2 + len(cells) + 3


def test_a_picture_is_drawn_of_whatever_was_measured(tmp_path):
    growth = [
        cell_of(run_of(str(n)), run_of(str(2 * n)), kind="growth", name=f"growth, {name}")
        for n, name in enumerate(("length", "batch", "ranks"), 1)
    ]
    shipped = cell_of(
        run_of("floor", held_out_loss=2.0),
        run_of("ours", held_out_loss=2.0),
        kind="shipped",
        name="shipped, medium",
    )
    for number, cells in enumerate(([], [shipped], [shipped, *growth])):
        tables.draw({"cells": cells}, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 10_000


# ---- Cells and commands ----


def test_cells_have_names_of_their_own_and_at_least_twenty_timed_steps():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    for cell in CELLS:
        assert cell.steps >= 20 or cell.kind == "start" or cell.num_rows // 8 >= 25, cell.name
        assert cell.kind == "growth" or list(cell.contestants)[0] == "floor", cell.name


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_command_is_accepted_by_its_program(cell, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    args = benchmark.parse_args()[1]
    for contestant in cell.contestants.values():
        command = benchmark.command_of(cell, contestant, REPO / "rows", REPO / "runs", args)
        script = next(
            i for i, word in enumerate(command) if word in (benchmark.RECIPE, benchmark.PEERS)
        )
        monkeypatch.setattr(sys, "argv", command[script:])
        (llama if command[script] == benchmark.RECIPE else benchmark_peers).parse_args()


def test_a_rank_that_did_not_run_is_a_failure(tmp_path, monkeypatch):
    """As with `accelerate launch --cpu --num_processes 2`, which starts one process and says nothing."""
    monkeypatch.setattr(benchmark, "command_of", lambda *_: [sys.executable, "-c", ""])
    words = ["benchmark.py", "--smoke", "--cells", "growth, ranks", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    args = benchmark.parse_args()[1]
    assert (
        benchmark.run_once(args.chosen[0], "2", tmp_path, args)["failed"]
        == "rank 1 of 2 did not run"
    )


def test_all_contestants_of_a_matched_cell_get_the_same_flags():
    for cell in (cell for cell in CELLS if cell.kind == "matched"):
        assert all(one.flags == {} and one.ranks == 1 for one in cell.contestants.values()), (
            cell.name
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cells", "nothing like it"],
        ["--cells", "("],
        ["--repeats", "0"],
        ["--steps", "1"],
        ["--device", "tpu"],
        ["--data", "missing"],
    ],
)
def test_a_wrong_call_is_one_line_and_64(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    assert stopped.value.code == 64 and len(capsys.readouterr().err.splitlines()) == 1


# ---- On a GPU ----


def gpu_cell(name="8B LoRA"):
    return next(cell for cell in benchmark.gpu_cells() if cell.name == name)


def test_a_gpu_is_not_waited_for_and_another_process_on_it_voids_a_run(monkeypatch):
    args = argparse.Namespace(smoke=False)
    monkeypatch.setattr(benchmark, "wait_until_idle", lambda: pytest.fail("it waits for the host"))
    monkeypatch.setattr(benchmark.os, "getloadavg", lambda: (40.0, 40.0, 40.0))
    monkeypatch.setattr(benchmark.machine, "gpu_processes", list)
    for after in (False, True):
        assert benchmark.machine_in_use(gpu_cell(), args, after=after) == (40.0, False)
    monkeypatch.setattr(benchmark.machine, "gpu_processes", lambda: [4711])
    assert benchmark.gpu_is_busy(patience=0)
    monkeypatch.setattr(benchmark, "gpu_is_busy", lambda: True)
    assert benchmark.machine_in_use(gpu_cell(), args) == (40.0, True)
    cpu = benchmark.cpu_cells()[0]
    assert benchmark.machine_in_use(cpu, args, after=True) == (40.0, True)


def test_on_a_gpu_all_contestants_compute_in_bf16(tmp_path):
    args = argparse.Namespace(output_dir=tmp_path, warmup=5)
    cell = gpu_cell("1B matched")
    for contestant in cell.contestants.values():
        variables = benchmark.environment(cell, contestant, tmp_path, args)
        assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
        words = benchmark.command_of(cell, contestant, tmp_path, tmp_path, args)
        if contestant.tool != "ours":
            assert words[words.index("--mixed_precision") + 1] == "bf16"
    cpu = benchmark.cpu_cells()[0]
    assert (
        benchmark.environment(cpu, cpu.contestants["floor"], tmp_path, args)[
            "ACCELERATE_MIXED_PRECISION"
        ]
        == "no"
    )


def test_peers_are_told_the_same_precision(monkeypatch, tmp_path):
    words = ["benchmark_peers.py", "trainer", "--model_name_or_path", "m", "--data", "d"]
    words += ["--output_dir", str(tmp_path)]
    for precision, bf16 in (("bf16", True), ("no", False)):
        monkeypatch.setattr(sys, "argv", [*words, "--mixed_precision", precision])
        assert benchmark_peers.common_settings(benchmark_peers.parse_args()[1])["bf16"] is bf16


def test_weights_that_only_a_gpu_needs_in_bf16_say_so():
    """Without fp32 weights small updates are lost, which the recipe refuses unless it is told."""
    for cell in benchmark.gpu_cells():
        for contestant in cell.contestants.values():
            flags = cell.flags | contestant.flags
            if flags.get("dtype") == "bfloat16" and not flags.get("use_peft"):
                assert flags["no_master_weights"] is True, cell.name


def test_flash_attention_knows_the_borders_of_rows_beforehand():
    for contestant in gpu_cell("1B attention").contestants.values():
        if contestant.flags["attn_implementation"].startswith("flash"):
            assert contestant.flags["padding_free"] and contestant.needs == "flash-attn"


def test_a_contestant_without_its_package_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(benchmark, "version_of", lambda package: None)
    cell, left_out = benchmark.without_missing(gpu_cell("1B attention"))
    assert left_out["flash_attention_2, 4096"] == "not installed: flash-attn"
    assert "sdpa, 4096" in cell.contestants and "flash_attention_2, 4096" not in cell.contestants


def test_weights_are_deleted_after_measuring(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run/model.safetensors", "run/metrics.jsonl"):
        (tmp_path / name).write_text("x")
    benchmark.delete_weights(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["metrics.jsonl"]


def test_a_gpu_without_gsm8k_trains_on_rows_that_are_made(tmp_path):
    args = argparse.Namespace(output_dir=tmp_path / "out", data=tmp_path / "missing", smoke=False)
    ladder = gpu_cell("3B ladder")
    rows = [
        json.loads(line) for line in benchmark.text_rows(ladder, {"max_length": 4096}, 50, args)
    ]
    lengths = [len(row["answer"]) for row in rows]
    assert len(rows) == 50 and max(lengths) > 3 * min(lengths)
    made = tmp_path / "out" / "models" / "8B" / "data"
    made.mkdir(parents=True)
    (made / "train.jsonl").write_text(
        json.dumps({"prompt": "Say lamp.", "completion": "lamp"}) + "\n"
    )
    rows = [
        json.loads(line) for line in benchmark.text_rows(gpu_cell(), {"max_length": 64}, 3, args)
    ]
    assert len(rows) == 3 and all(len(row["completion"]) >= 6 * 64 for row in rows)
