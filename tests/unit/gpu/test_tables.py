# SPDX-License-Identifier: Apache-2.0
"""The tables of a GPU: "not measured yet" without results, and with them what the records say.

The records are made here by the runner itself, from a small program in the place of a cell: their
form is the real one, their figures are made up and never leave the test.
"""

import json
import shutil

import pytest

from gpu import runner, tables
from gpu.cell import Cell
from launching import REPO
from publish import pages

PROGRAM = """
import json, os, sys
name = sys.argv[sys.argv.index("--worker") + 1]
output = sys.argv[sys.argv.index("--output") + 1]
rows = [
    {"what": "this recipe", "tokens/s": 12345, "right": True},
    {"what": "a|b", "error": 0.00123456},
]
ok = {"speed.8b_lora": True, "resume.engines": False}.get(name)
with open(os.path.join(output, "work", name, "outcome.json"), "w") as file:
    json.dump({"rows": rows, "ok": ok, "commands": ["python x.py"]}, file)
"""
PAGE = REPO / "docs" / "gpu.md"
FACTS = {
    "device": "a made-up GPU",
    "driver": "1.2.3",
    "compute_capability": "9.0",
    "memory_mib": 1.0,
    "versions": {"torch": "2.0", "deepspeed": None, "cuda": "13.0"},
    "commit": "abc",
}
NEEDS = {
    "speed.8b_lora": (),
    "resume.engines": (),
    "saves.by_part": (),
    "strategies.zero": ("no-such-package",),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of four records, as the runner writes them."""
    folder = tmp_path_factory.mktemp("proof")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    proof = runner.Proof("cuda", False, folder / "out", FACTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "PROGRAM", program)
        for name, needs in NEEDS.items():
            bound = f"a bound of {name}"
            runner.run_cell(Cell(name, f"a claim of {name}", "", bound, 20, needs), proof)
    shutil.rmtree(proof.output / "work")
    return proof.output


@pytest.fixture
def records(written, tmp_path):
    """The folder of a test's own copy of the records."""
    return shutil.copytree(written, tmp_path / "out")


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| `{start}`"))


def change(path, **facts):
    """Change a record; None deletes a field."""
    record = json.loads(path.read_text()) | facts
    kept = {name: value for name, value in record.items() if value is not None}
    path.write_text(json.dumps(kept))


def test_without_results_there_is_no_figure(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert tables.read_records(folder) == []
    assert tables.block([]).startswith("Not measured yet")
    assert tables.details([]).startswith("Not measured yet")


def test_the_page_says_so_too_unless_results_are_there():
    text = PAGE.read_text().split("<!-- gpu -->")[1].split("<!-- end of gpu -->")[0]
    measured = tables.read_records(REPO / "results" / "gpu")
    assert text.strip() == tables.block(measured)


def test_the_table_has_claim_bound_and_verdict_in_the_order_of_the_cells(records):
    text = tables.block(tables.read_records(records))
    assert "a made-up GPU, driver 1.2.3, torch 2.0, cuda 13.0, commit abc" in text
    assert "deepspeed" not in text
    cells = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert cells == ["strategies.zero", "resume.engines", "speed.8b_lora", "saves.by_part"]
    assert "| yes" in line_of(text, "speed.8b_lora")
    assert "a bound of speed.8b_lora" in line_of(text, "speed.8b_lora")
    assert "**no**" in line_of(text, "resume.engines")
    assert "measured" in line_of(text, "saves.by_part")
    assert "skipped (not installed: no-such-package)" in line_of(text, "strategies.zero")


def test_details_have_every_number_and_command(records):
    text = tables.details(tables.read_records(records))
    assert text.count("python x.py") == 3
    for number in ("12,345", "0.001235", "a\\|b"):
        assert number in text
    assert "not installed: no-such-package" in text


def test_speeds_and_plans_have_a_line_for_each_run_with_figures(records):
    rows = [
        {"what": "this recipe", "tokens/s": 12345, "allocated, GiB": 8.0, "planned, GiB": 7.96},
        {"what": "Trainer", "tokens/s": 1000, "allocated, GiB": 9.5, "MFU": 0.25},
        {"what": "SFTTrainer", "result": "no time left"},
    ]
    change(records / "speed.8b_lora.json", rows=rows)
    measured = {"run": "1B 1 x 1024", "planned tensors": 3 * 2**30, "allocated": 2 * 2**30}
    failed = {"run": "1B 2 x 1024", "result": "exit code 1"}
    change(records / "saves.by_part.json", cell="planner.small", rows=[measured, failed])
    found = tables.read_records(records)
    speeds = [line.split("|")[2:-1] for line in tables.speed_block(found).splitlines()[2:]]
    assert [[cell.strip() for cell in line] for line in speeds] == [
        ["this recipe", "12,345", "8.00", "7.96", ""],
        ["Trainer", "1,000", "9.50", "", "25.0%"],
    ]
    planned = [line.split("|")[1:-1] for line in tables.plan_block(found).splitlines()[2:]]
    assert [[cell.strip() for cell in line] for line in planned] == [
        ["8B LoRA, 2 rows of 4,096 tokens", "7.96", "8.00", "-0.5%"],
        ["`1B 1 x 1024`", "3.00", "2.00", "+50.0%"],
    ]
    assert tables.speed_block([]) == tables.plan_block([]) == tables.NOT_MEASURED


def test_the_page_is_filled_from_records(records):
    results = pages.read_results() | {"gpu": tables.read_records(records)}
    filled = pages.fill(PAGE.read_text(), results)
    assert "a made-up GPU" in filled
    assert f"<!-- gpu -->\n{tables.NOT_MEASURED}" not in filled
    assert "12,345" in pages.whole(results)


def test_records_of_two_machines_are_told_apart(records):
    change(records / "saves.by_part.json", device="another GPU")
    text = tables.block(tables.read_records(records))
    assert "a made-up GPU" in text
    assert "and on another GPU" in text


@pytest.mark.parametrize("facts", [{"tiny": True}, {"verdict": None}])
def test_what_is_no_measurement_is_refused(records, facts):
    change(records / "saves.by_part.json", **facts)
    with pytest.raises(ValueError, match="saves.by_part.json"):
        tables.read_records(records)
