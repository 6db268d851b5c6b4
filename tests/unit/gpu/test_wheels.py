# SPDX-License-Identifier: Apache-2.0
"""A trimmed wheel has a correct RECORD, and a wheel that is missing or too large is named."""

import importlib.metadata
import sys
import zipfile

import pytest

import gpu_wheels
from gpu import wheels
from wheel_files import LIBRARIES, make_wheel


def test_a_trimmed_wheel_keeps_two_libraries(tmp_path):
    wheel = make_wheel(tmp_path)
    wheels.trim_bitsandbytes(wheel, "130")
    wheels.check_record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name.split("/")[1] for name in archive.namelist() if name.endswith(".so")}
    assert libraries == {"libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so"}


def test_a_wheel_without_the_wanted_library_is_named(tmp_path):
    wheel = make_wheel(tmp_path, LIBRARIES[1:])
    with pytest.raises(wheels.WheelError, match="has no libbitsandbytes_cuda130.so, only"):
        wheels.trim_bitsandbytes(wheel, "130")


@pytest.mark.parametrize("content", [b"name = 'other'\n", None])
def test_a_wheel_that_differs_from_its_record_is_found(tmp_path, content):
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    if content is None:
        del files["bitsandbytes/__init__.py"]
    else:
        files["bitsandbytes/__init__.py"] = content
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    with pytest.raises(wheels.WheelError):
        wheels.check_record(wheel)


def test_versions_are_those_that_the_tests_use():
    installed = importlib.metadata.version("peft")
    assert wheels.version_wanted("peft") == f"peft=={installed}"
    torch = importlib.metadata.version("torch").split("+")[0]
    assert wheels.version_wanted("torch") == f"torch=={torch}"  # an index knows no +cpu
    assert wheels.version_wanted("no-such-package") == "no-such-package"


def collect(folder, monkeypatch, most_mib):
    def fetch(package, folder, python_version):
        return make_wheel(folder)

    monkeypatch.setattr(wheels, "fetch", fetch)
    monkeypatch.setattr(wheels, "check_install", lambda folder, python_version: 0)
    wheels.collect(folder, wheels.Target("3.12", "130", ["bitsandbytes"]), most_mib)


def test_what_else_lies_in_the_folder_stays(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "old-1-py3-none-any.whl").touch()
    collect(tmp_path, monkeypatch, 60)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"thesis.txt", "bitsandbytes-1.0-py3-none-any.whl"}


def test_a_folder_above_the_limit_is_an_error(tmp_path, monkeypatch, capsys):
    collect(tmp_path, monkeypatch, 60)
    assert "MiB  in all" in capsys.readouterr().out
    with pytest.raises(wheels.WheelError, match="more than --most_mib 0.0001"):
        collect(tmp_path, monkeypatch, 0.0001)


@pytest.mark.parametrize(
    "arguments", [["--python_version", "312"], ["--most_mib", "0"], ["--cudas", "130"]]
)
def test_a_wrong_call_is_64(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        gpu_wheels.main()
    assert stopped.value.code == 64
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"), [(wheels.WheelError("torch: none"), 1), (OSError("read-only"), 73)]
)
def test_a_failure_is_one_line_and_its_exit_code(error, code, monkeypatch, capsys):
    def fail(folder, target, most_mib):
        raise error

    monkeypatch.setattr(gpu_wheels, "collect", fail)
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py"])
    assert gpu_wheels.main() == code
    printed = capsys.readouterr()
    assert printed.err.startswith("gpu_wheels.py: ")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
