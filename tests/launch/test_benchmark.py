"""One cell of scripts/benchmark.py in small: all contestants train alike, and one that learns otherwise is void."""

import json
import sys

import pytest

import benchmark
from launching import run


@pytest.fixture(scope="module")
def cell(once):
    """The smallest cell with a Trainer that has another learning rate as a fifth contestant."""
    return json.loads((once("benchmark", measure) / "out.json").read_text())["cells"][0]


def measure(folder):
    patch = pytest.MonkeyPatch()
    name = "matched, near zero"
    found = next(cell for cell in benchmark.cpu_cells() if cell.name == name)
    planted = benchmark.Contestant("trainer", {"learning_rate": 6e-4})
    found = found._replace(contestants=found.contestants | {"planted": planted})
    patch.setattr(benchmark, "cpu_cells", lambda: [found])
    words = ["--smoke", "--cells", name, "--repeats", "1", "--steps", "4", "--output_dir", folder]
    patch.setattr(
        sys, "argv", ["benchmark.py", *map(str, words), "--json", str(folder / "out.json")]
    )
    with patch.context(), pytest.raises(SystemExit) as ended:
        benchmark.main()
    patch.undo()
    assert ended.value.code == 1  # one is void


def test_all_contestants_train_alike(cell):
    runs = {run["contestant"]: run for run in cell["runs"]}
    assert list(runs) == ["floor", "lean", "ours", "trainer", "trl", "planted"]
    for name in ("floor", "lean", "ours", "trainer", "trl"):
        assert runs[name]["void"] == "" and runs[name]["difference"] <= 1e-5, runs[name]
        assert runs[name]["seconds_per_step"] > 0 and runs[name]["memory_mib"]["resident"] > 100
    assert len({(run["steps"], run["tokens"]) for run in runs.values()}) == 1  # the same rows


def test_another_learning_rate_is_void(cell):
    planted = next(run for run in cell["runs"] if run["contestant"] == "planted")
    assert "loss differs" in planted["void"] and "failed" not in planted


def test_a_cell_says_how_it_was_measured(cell):
    assert (
        cell["versions"]["trl"].startswith("1.16") and cell["commit"] and "cores" in cell["device"]
    )
    assert cell["commands"]["ours"].startswith("python scripts/benchmark_probe.py RUNS")
    assert "/home" not in json.dumps(cell) and sys.executable not in json.dumps(cell)


def test_the_probe_passes_a_script_its_arguments_and_its_exit_code_on(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(
        "import sys, torch\nweight = torch.ones(1, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=1.0)\n"
        "for _ in range(int(sys.argv[1])):\n    weight.sum().backward()\n    optimizer.step()\n"
        "sys.exit(7)\n"
    )
    done = run(sys.executable, "scripts/benchmark_probe.py", out, script, 3)
    assert done.returncode == 7, done.output
    found = json.loads(out.read_text())
    assert len(found["ends"]) == 3 and found["ends"] == sorted(found["ends"])
    assert found["started"] >= 0 and found["memory"]["resident"] > 10 * 2**20
