# SPDX-License-Identifier: Apache-2.0
"""evidence/gpu_proof.py lists its cells and refuses a wrong call in one line."""

import sys

import pytest

import gpu_proof
from gpu.catalog import CELLS


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *arguments])
    return gpu_proof.main()


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
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *arguments)
    assert stopped.value.code == 64
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_gpu_it_says_how_to_try_it(monkeypatch, capsys):
    monkeypatch.setattr(gpu_proof.machine, "gpu_facts", dict)
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch)
    assert stopped.value.code == 64
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_the_list_names_every_cell_and_starts_nothing(monkeypatch, capsys):
    assert call(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [cell.name for cell in CELLS]


def test_an_output_that_is_a_file_is_one_line_and_73(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    output.touch()
    words = ["--device", "cpu", "--tiny", "--only", "micro.context", "--output", str(output)]
    assert call(monkeypatch, *words) == 73
    expected = f"error: --output {output}: cannot write there: File exists\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("skipped", 0), ("not ok", 1)])
def test_the_exit_code_says_whether_every_cell_is_within_its_bound(
    verdict, code, tmp_path, monkeypatch, capsys
):
    def run_all(cells, proof, minutes, retry):
        return [{"verdict": verdict} for _ in cells]

    monkeypatch.setattr(gpu_proof.runner, "run_all", run_all)
    monkeypatch.setattr(gpu_proof.signal, "signal", lambda number, handler: None)
    words = ["--device", "cpu", "--tiny", "--only", "micro.found_inf", "--output", str(tmp_path)]
    assert call(monkeypatch, *words) == code
    assert capsys.readouterr().out.startswith(f"1 of 1 cells: 1 {verdict}\n")
