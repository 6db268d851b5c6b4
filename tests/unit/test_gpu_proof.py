"""The kit for the first GPU hour: its cells are well formed, and its runner limits, kills, records and resumes.

The runner starts a small program instead of a real cell, so that each test takes a second.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import benchmark
import benchmark_peers
import benchmark_probe
import gpu_proof
import llama
import rehearse
import vit
from gpu import correct, launches, planner, runner, speed
from gpu.catalog import CELLS
from gpu.cell import LONGEST, Cell, Setup, relative_error, write_json
from launching import CONFIGS

# What a cell's process does, by the name of the cell
PROGRAM = """
import json, os, subprocess, sys, time
name = sys.argv[sys.argv.index("--worker") + 1]
work = os.path.join(sys.argv[sys.argv.index("--output") + 1], "work", name)
def outcome(**found):
    with open(os.path.join(work, "outcome.json"), "w") as file:
        json.dump(found, file)
print("the cell", name, "started", flush=True)
if name == "good":
    open(os.path.join(work, "model.safetensors"), "w").close()
    outcome(rows=[{"x": 1}], ok=True, commands=["python x.py"])
if name == "measured":
    outcome(rows=[{"x": 2}], ok=None, commands=[])
if name == "out of bound":
    outcome(rows=[{"x": 3}], ok=False, commands=[])
if name == "skips":
    outcome(skipped="no compiler")
if name == "fails":
    sys.exit("ValueError: it broke")
if name == "half done":
    outcome(rows=[{"x": 4}], ok=True, commands=[])
    sys.exit(3)
if name == "sleeps":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    outcome(rows=[{"child": child.pid}], ok=True, commands=[])
    time.sleep(600)
"""


FACTS = {"device": "a processor", "driver": None, "versions": {"python": "3"}, "commit": "abc"}


@pytest.fixture
def small_program(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(runner, "PROGRAM", path)


def cell(name, **facts):
    return Cell(name, f"that {name} works", lambda setup: None, "a bound", **facts)


def run(tmp_path, *names, retry=False, minutes=None, **facts):
    """Run cells of the small program; returns (their verdicts by name, lines printed)."""
    lines = []
    cells = [cell(name, **facts) for name in names]
    output = tmp_path / "out"
    records = runner.run_all(cells, "cpu", True, output, FACTS, minutes, retry, lines.append)
    return {record["cell"]: record["verdict"] for record in records}, lines


def record_of(tmp_path, name):
    return json.loads((tmp_path / "out" / f"{name}.json").read_text())


# ---- Cells ----


def test_cells_have_names_of_their_own_a_claim_and_a_limit():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names) and len(names) >= 40
    for one in CELLS:
        assert one.name.count(".") == 1 and len(one.proves) > 20, one.name
        assert 0 < one.limit <= LONGEST == 300, one.name


def test_the_most_valuable_come_first():
    topics = list(dict.fromkeys(cell.name.split(".")[0] for cell in CELLS))
    assert topics[:4] == ["micro", "strategies", "masks", "parity"]
    assert topics.index("resume") < topics.index("recipes") < topics.index("speed")


def test_every_function_of_a_cell_exists():
    for one in CELLS:
        assert callable(one.run.function()), one.name


def test_every_yaml_is_trained_by_a_cell_or_says_why_not(tmp_path, monkeypatch):
    seen = []

    def train_all(setup, variants, data):
        seen.extend(variants)
        return []

    monkeypatch.setattr(correct, "train_all", train_all)
    monkeypatch.setattr(correct, "tiny_model", lambda setup: None)
    monkeypatch.setattr(correct, "needs_compiler", lambda: None)
    setup = Setup("cuda", False, tmp_path, tmp_path, time.monotonic() + 99)
    for one in CELLS:
        if one.name.startswith("strategies."):
            one.run(setup)
    shipped = {path.stem for path in CONFIGS.glob("*.yaml") if not path.is_symlink()}
    assert {variant.config for variant in seen} == shipped
    left_out = {variant.name for variant in seen if variant.left_out}
    assert left_out == {
        "fsdp1_hybrid_shard",
        "fsdp2_hybrid_shard",
        "fsdp1_full_shard, QLoRA",
        "fsdp1_shard_grad_op, QLoRA",
        "fsdp1_no_shard, QLoRA",
    }


# ---- Running ----


def test_a_trial_in_tiny_on_a_cpu_is_not_taken_for_the_measurement(small_program, tmp_path):
    run(tmp_path, "good")
    lines, gpu = [], FACTS | {"device": "a GPU"}
    runner.run_all([cell("good")], "cpu", True, tmp_path / "out", gpu, None, False, lines.append)
    runner.run_all([cell("good")], "cpu", False, tmp_path / "out", gpu, None, False, lines.append)
    runner.run_all([cell("good")], "cpu", False, tmp_path / "out", gpu, None, False, lines.append)
    assert ["done before" in line for line in lines] == [False, False, True]


def test_an_output_that_is_a_file_is_one_line_and_73(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").touch()
    words = [
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "micro.context",
        "--output",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *words])
    assert gpu_proof.main() == 73
    assert (
        capsys.readouterr().err
        == f"error: --output {tmp_path / 'out'}: cannot write there: File exists\n"
    )


def test_verdicts_follow_from_what_the_cell_left(small_program, tmp_path):
    verdicts, lines = run(
        tmp_path, "good", "measured", "out of bound", "skips", "fails", "half done"
    )
    assert verdicts == {
        "good": "ok",
        "measured": "measured",
        "out of bound": "not ok",
        "skips": "skipped",
        "fails": "failed",
        "half done": "failed",
    }
    good = record_of(tmp_path, "good")
    assert (
        good["rows"] == [{"x": 1}] and good["commands"] == ["python x.py"] and good["error"] is None
    )
    assert good["bound"] == "a bound" and good["seconds"] >= 0 and "python" in good["versions"]
    assert record_of(tmp_path, "skips")["error"] == "no compiler"
    assert "ValueError: it broke" in record_of(tmp_path, "fails")["error"]
    assert record_of(tmp_path, "half done")["rows"] == [{"x": 4}]
    assert len(lines) == 6 and "failed" in lines[4]
    assert not (tmp_path / "out" / "work" / "good" / "model.safetensors").exists()


def test_a_cell_over_its_limit_is_killed_with_all_its_processes_and_keeps_its_rows(
    small_program, tmp_path
):
    begun = time.monotonic()
    verdicts, _ = run(tmp_path, "sleeps", limit=1)
    assert verdicts == {"sleeps": "timed out"} and time.monotonic() - begun < 30
    record = record_of(tmp_path, "sleeps")
    assert "killed after 3 s" in record["error"] and "the cell sleeps started" in record["error"]
    child = record["rows"][0]["child"]  # which had moved to a session of its own
    assert not is_alive(child)


def is_alive(process):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_second_start_does_what_is_missing_and_with_retry_what_failed(small_program, tmp_path):
    names = ("good", "fails", "skips")
    run(tmp_path, *names)
    _, lines = run(tmp_path, *names)
    assert ["done before" in line for line in lines] == [True, True, False]
    _, lines = run(tmp_path, *names, retry=True)
    assert ["done before" in line for line in lines] == [True, False, False]


def test_a_broken_record_is_not_taken_for_a_result(small_program, tmp_path):
    run(tmp_path, "good")
    (tmp_path / "out" / "good.json").write_text('{"cell": "go')
    _, lines = run(tmp_path, "good")
    assert "done before" not in lines[0] and record_of(tmp_path, "good")["verdict"] == "ok"


def test_the_total_limit_leaves_out_what_would_not_fit(small_program, tmp_path):
    lines = []
    cells = [cell("good", limit=100), cell("measured", limit=10)]
    records = runner.run_all(
        cells, "cpu", True, tmp_path / "out", FACTS, minutes=1, show=lines.append
    )
    assert [record["cell"] for record in records] == ["measured"]
    assert "no time" in lines[0] and "its limit is 300 s" in lines[0]
    assert not (tmp_path / "out" / "good.json").exists()  # to be run another time


def test_what_cannot_run_here_is_skipped_with_the_reason(small_program, tmp_path):
    run(tmp_path, "good", cuda_only="it asks CUDA")
    assert record_of(tmp_path, "good")["error"] == "needs a GPU: it asks CUDA"
    run(tmp_path, "good", needs=("torch", "no-such-package", "nor-this"))
    assert record_of(tmp_path, "good")["error"] == "not installed: no-such-package, nor-this"


def test_the_mark_finds_every_process_of_a_cell_and_no_other():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    marked = subprocess.Popen(
        sleep, env={**os.environ, runner.MARK: "mine"}, start_new_session=True
    )
    other = subprocess.Popen(sleep, env={**os.environ, runner.MARK: "minefield"})
    try:
        end = time.monotonic() + 10  # until the new process has its own environment
        while runner.marked_processes("mine") != [marked.pid] and time.monotonic() < end:
            time.sleep(0.05)
        assert runner.marked_processes("mine") == [marked.pid]
        runner.kill_marked("mine")
        assert marked.wait(timeout=10) == -9 and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "("],
        ["--only", "no such cell"],
        ["--minutes", "0"],
        ["--device", "cpu"],
        ["--device", "tpu"],
        ["--worker", "nothing", "--tiny"],
    ],
)
def test_a_wrong_call_is_one_line_and_64(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        gpu_proof.main()
    assert stopped.value.code == 64 and len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_gpu_it_says_how_to_try_it(monkeypatch, capsys):
    monkeypatch.setattr(gpu_proof.machine, "gpu_facts", dict)
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py"])
    with pytest.raises(SystemExit) as stopped:
        gpu_proof.main()
    assert stopped.value.code == 64 and "--device cpu --tiny" in capsys.readouterr().err


def test_the_list_names_every_cell_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--list"])
    gpu_proof.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [cell.name for cell in CELLS]


def test_the_tests_start_without_packages_that_a_machine_may_lack(monkeypatch):
    from conftest import pytest_report_header

    monkeypatch.setattr(
        launches.machine, "version_of", lambda package: "1.0" if package == "torch" else None
    )
    assert (
        '"torch": "1.0"' in pytest_report_header() and '"deepspeed": null' in pytest_report_header()
    )


def test_the_tests_of_a_gpu_are_the_cells_that_prove_something():
    text = (Path(__file__).parents[1] / "gpu" / "test_cells.py").read_text()
    topics = re.findall(r'"(\w+)"', re.search(r"^TOPICS = [^)]*", text, re.MULTILINE)[0])
    chosen = {cell.name for cell in CELLS if cell.name.split(".")[0] in topics}
    assert {
        "resume.optimizers",
        "quantized.bases",
        "parity.precisions",
        "recipes.bert",
        "masks.documents",
    } <= chosen
    assert not {name for name in chosen if name.startswith(("speed.", "planner.", "models."))}


# ---- Reading ----


def steps(*losses, first=1):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, first)]


def test_the_largest_difference_is_over_the_steps_that_were_logged():
    assert launches.largest_difference(steps(2.0, 1.1), steps(2.0, 1.0)) == pytest.approx(0.1)
    seldom = [{"step": 2, "loss": 1.0}, {"step": 4, "loss": 0.5}]
    assert launches.largest_difference(seldom, steps(3.0, 1.0, 0.7, 0.5)) == 0


@pytest.mark.parametrize("found", [[], steps(2.0), steps(2.0, None), steps(2.0, 1.0, 0.5)])
def test_a_missing_or_broken_step_is_no_agreement(found):
    assert launches.largest_difference(found, steps(2.0, 1.0)) == float("inf")


def test_nothing_is_near_a_missing_number():
    assert (
        relative_error(None, 1.0)
        == relative_error(1.0, 0)
        == relative_error(float("nan"), 1.0)
        == float("inf")
    )


def test_a_loss_falls_if_its_last_steps_are_below_its_first():
    assert launches.falls([3.0, 2.9, 2.0, 1.9]) and not launches.falls([2.0, 2.1, 2.0, 2.1])
    assert not launches.falls([2.0]) and not launches.falls([2.0, None])


def test_a_variant_is_left_out_with_its_reason(tmp_path, monkeypatch):
    setup = Setup("cpu", True, tmp_path, tmp_path, time.monotonic() + 99)
    monkeypatch.setattr(launches.machine, "version_of", lambda package: None)
    zero = launches.Variant("zero", "deepspeed_zero2", flags=launches.adapters(setup, "nf4"))
    assert launches.reason_left_out(setup, zero) == "not installed: deepspeed, bitsandbytes"
    paged = launches.Variant("paged", flags=("--optim", "paged_adamw_8bit"))
    assert launches.reason_left_out(setup, paged) == "not installed: bitsandbytes"
    trained = launches.train(setup, launches.Variant("plain", left_out="it is refused"), tmp_path)
    assert trained.why == "left out: it is refused" and not launches.failed(trained)


def test_the_error_of_a_launch_is_its_own_line():
    assert launches.error_of("a\nerror: --dtype is wrong\nlast") == "error: --dtype is wrong"
    assert (
        launches.error_of("a\ntorch.OutOfMemoryError: CUDA\nlast\n")
        == "torch.OutOfMemoryError: CUDA"
    )
    assert launches.error_of("a\nlast\n") == "last" and launches.error_of("") == "no output"


def test_a_cell_can_run_a_file_of_tests(tmp_path):
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\n\n\ndef test_right():\n    pass\n\n\n"
        "def test_wrong():\n    assert 1 == 2\n\n\ndef test_not_here():\n    pytest.skip('no kernel')\n"
    )
    setup = Setup("cpu", True, tmp_path, tmp_path, time.monotonic() + 99)
    outcome = correct.run_tests(setup, tests)
    assert [row["result"].split(" ")[0] for row in outcome.rows] == [
        "passed",
        "failure:",
        "skipped:",
    ]
    assert "no kernel" in outcome.rows[2]["result"] and outcome.ok is False
    tests.write_text("def test_right():\n    pass\n")
    assert correct.run_tests(setup, tests).ok is True
    tests.write_text("import pytest\n\n\ndef test_not_here():\n    pytest.skip('no kernel')\n")
    assert correct.run_tests(setup, tests).ok is False  # nothing was shown


# ---- The planner's constants ----

GIB = 2**30


def runs_with(rounding, context, number=8):
    """Runs that take exactly what these constants say."""
    runs = []
    for i in range(1, number + 1):
        reserved = i * GIB * (1 + rounding)
        runs.append(
            {
                "planned tensors": i * GIB,
                "allocated": i * GIB,
                "reserved": reserved,
                "process": reserved + context,
            }
        )
    return runs


def test_constants_are_found_again_and_the_error_is_that_of_the_other_half():
    outcome = planner.judge(runs_with(0.03, GIB // 2))
    found = {row["what"]: row["value"] for row in outcome.rows}
    assert outcome.ok and found["rounding, fitted"] == 0.03 and found["context, GiB, fitted"] == 0.5
    assert found["runs fitted"] == found["runs held out"] == 4
    assert abs(found["furthest below, held out"]) < 1e-3


def test_a_plan_that_is_too_low_on_held_out_runs_is_not_ok():
    runs = runs_with(0.03, GIB // 2)
    runs[1]["process"] *= 1.05  # held out: out of memory
    assert not planner.judge(runs).ok
    runs = runs_with(0.03, GIB // 2)
    runs[0]["process"] *= 1.05  # fitted: the median does not see it
    assert planner.judge(runs).ok


# ---- Speed ----


def row(what, result="trained", difference=0.0, times=1.0, **numbers):
    return {
        "what": what,
        "result": result,
        "loss differs by": difference,
        "times the recipe's step": times,
    } | numbers


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("this recipe"), row("lean loop"), row("bare PyTorch loop", times=1.2)], True),
        ([row("this recipe", "exit code 1")], False),
        ([row("this recipe"), row("lean loop", difference=0.02)], False),  # nats: another curve
        ([row("this recipe"), row("lean loop", times=0.9)], False),  # the recipe is 11 % slower
        (
            [row("this recipe"), row("bare PyTorch loop", "exit code 1"), row("lean loop")],
            True,
        ),  # out of memory
        (
            [row("this recipe"), row("SFTTrainer", difference=0.5)],
            True,
        ),  # shown, but the loops decide
    ],
)
def test_a_speed_counts_beside_bare_loops_with_the_same_losses(rows, expected):
    setup = Setup("cuda", False, Path(), Path(), 0.0)
    assert speed.verdict(rows, lambda ours: True, setup) is expected
    assert speed.verdict(rows, lambda ours: False, setup) is False


def test_published_figures_are_bounds_of_the_recipe():
    assert speed.fast_enough_lora({"tokens/s": 9_000}) and not speed.fast_enough_lora(
        {"tokens/s": 8_000}
    )
    assert speed.fast_enough_full({"MFU": 0.5}) and not speed.fast_enough_full({"MFU": 0.4})
    assert speed.fast_enough_full({}) is None  # a card whose peak is not known
    assert speed.small_enough_qlora({"allocated, GiB": 7.4}) and not speed.small_enough_qlora(
        {"allocated, GiB": 9.0}
    )


def test_the_parts_of_a_save_count_what_the_save_calls_and_not_the_rest(tmp_path):
    (tmp_path / "whole_state.py").write_text(
        "import time\n\n\ndef gather():\n    time.sleep(0.05)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(
        "import time\n\nimport whole_state\n\ntime.sleep(0.3)\nwhole_state.gather()\n"
    )
    profile = tmp_path / "profile.bin"
    subprocess.run([sys.executable, "-m", "cProfile", "-o", profile, script], check=True)
    found = {row["function"]: row for row in speed.profile_rows(profile)}
    slept = next(row for name, row in found.items() if "sleep" in name)
    assert slept["calls"] == 1 and 0.05 <= slept["seconds"] < 0.3
    assert found["whole_state.py: gather"]["seconds"] >= 0.05


# ---- Commands that only a GPU runs ----


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """A Setup of a GPU of whose launches the command lines are collected and nothing is started."""
    commands = []

    def train_all(setup, variants, data):
        for variant in variants:
            commands.append(launches.command_of(setup, variant, data, tmp_path))
        return [launches.Trained(variant, None, "left out: not started") for variant in variants]

    def run_once(cell, label, data, args):
        commands.append(benchmark.command_of(cell, cell.contestants[label], data, tmp_path, args))
        return {"failed": "not started"}

    def run(command, **options):
        commands.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, 1, "not started")

    monkeypatch.setattr(correct, "train_all", train_all)
    for module in (correct, launches):
        monkeypatch.setattr(module, "tiny_model", lambda setup, recipe="llama": tmp_path)
    monkeypatch.setattr(launches, "wide_model", lambda setup: tmp_path)
    monkeypatch.setattr(launches, "made", lambda folder, command: tmp_path)
    monkeypatch.setattr(correct, "needs_compiler", lambda: None)
    monkeypatch.setattr(benchmark, "run_once", run_once)
    monkeypatch.setattr(benchmark, "make_models", lambda names, args: None)
    monkeypatch.setattr(benchmark, "prepare", lambda cell, contestant, args: tmp_path)
    monkeypatch.setattr(benchmark, "without_missing", lambda cell: (cell, {}))
    monkeypatch.setattr(speed, "device_name", lambda setup: "a GPU")
    monkeypatch.setattr(launches.machine, "nvidia_smi", lambda *options: [])
    monkeypatch.setattr(speed.subprocess, "run", run)
    return Setup("cuda", False, tmp_path, tmp_path, time.monotonic() + 999), commands


OTHERS = (
    "recipes.",
    "masks.documents",
    "models.",
    "planner.constants",
)  # which start no recipe by a command line
LAUNCHING = [
    cell
    for cell in CELLS
    if cell.run.module in ("correct", "speed", "planner") and not cell.name.startswith(OTHERS)
]


@pytest.mark.parametrize("one", LAUNCHING, ids=lambda cell: cell.name)
def test_every_command_for_a_gpu_is_accepted(one, on_a_gpu, monkeypatch):
    setup, commands = on_a_gpu
    try:
        one.run(setup)
    except RuntimeError as error:
        assert "not started" in str(error)
    assert commands
    for command in commands:
        check(command, monkeypatch)


def check(command, monkeypatch):
    """Let each program of a command line read what is meant for it: the recipe or the peer, rehearse and the probe."""
    programs = {
        "recipes/llama.py": llama,
        "recipes/vit.py": vit,
        "scripts/benchmark_peers.py": benchmark_peers,
        "scripts/rehearse.py": rehearse,
        "scripts/benchmark_probe.py": benchmark_probe,
    }
    known = [place for place, word in enumerate(command) if word in programs]
    assert known, command
    for place in known:
        monkeypatch.setattr(sys, "argv", command[place:])
        programs[command[place]].parse_args()
    if "recipes/llama.py" in command and "--attn_implementation" in command:
        kernel = command[command.index("--attn_implementation") + 1]
        assert kernel in ("eager", "sdpa", "flex_attention", "flash_attention_2", "varlen")
