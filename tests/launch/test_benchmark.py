# SPDX-License-Identifier: Apache-2.0
"""A small cell of evidence/benchmark.py: all contestants train alike, and a planted one is void."""

import json
import sys
from dataclasses import replace

import pytest

import benchmark
from bench.cells import Contestant
from bench.cpu_cells import cpu_cells
from launching import run

NAME = "matched, near zero"


@pytest.fixture(scope="module")
def cell(once):
    """The smallest cell, with a Trainer that has another learning rate as one more contestant."""
    return json.loads((once("benchmark", measure) / "out.json").read_text())["cells"][0]


def measure(folder):
    smallest = next(cell for cell in cpu_cells() if cell.name == NAME)
    planted = {"planted": Contestant("trainer", {"learning_rate": 6e-4})}
    smallest = replace(smallest, contestants=smallest.contestants | planted)
    words = ["--smoke", "--cells", NAME, "--repeats", "1", "--steps", "4"]
    words += ["--output_dir", folder, "--json", folder / "out.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "cpu_cells", lambda: [smallest])
        patch.setattr(sys, "argv", ["benchmark.py", *map(str, words)])
        assert benchmark.main() == 1  # one is void


def test_all_contestants_train_alike(cell):
    runs = {run["contestant"]: run for run in cell["runs"]}
    assert list(runs) == ["floor", "lean", "ours", "trainer", "trl", "planted"]
    for name in ("floor", "lean", "ours", "trainer", "trl"):
        assert runs[name]["void"] == "", runs[name]
        assert runs[name]["difference"] <= 1e-5, runs[name]
        assert runs[name]["seconds_per_step"] > 0
        assert runs[name]["memory_mib"]["resident"] > 100
    assert len({(run["steps"], run["tokens"]) for run in runs.values()}) == 1  # the same rows


def test_another_learning_rate_is_void(cell):
    planted = next(run for run in cell["runs"] if run["contestant"] == "planted")
    assert "loss differs" in planted["void"]
    assert "failed" not in planted


def test_a_cell_says_how_it_was_measured(cell):
    assert cell["versions"]["trl"].startswith("1.16")
    assert cell["commit"]
    assert "cores" in cell["device"]
    assert cell["commands"]["ours"].startswith("python evidence/benchmark_probe.py RUNS")
    assert "/home" not in json.dumps(cell)
    assert sys.executable not in json.dumps(cell)


def test_the_probe_passes_a_script_its_arguments_and_its_exit_code_on(tmp_path):
    script = tmp_path / "script.py"
    out = tmp_path / "out.json"
    script.write_text(
        "import sys, torch\n"
        "assert sys.path[0] == sys.argv[2], sys.path\n"
        "assert not any(folder.endswith('recipes') for folder in sys.path), sys.path\n"
        "weight = torch.ones(1, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=1.0)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "sys.exit(7)\n"
    )
    done = run(sys.executable, "evidence/benchmark_probe.py", out, script, 3, tmp_path)
    assert done.returncode == 7, done.output
    found = json.loads(out.read_text())
    assert len(found["ends"]) == 3
    assert found["ends"] == sorted(found["ends"])
    assert found["started"] >= 0
    assert found["memory"]["resident"] > 10 * 2**20
