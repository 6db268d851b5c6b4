# SPDX-License-Identifier: Apache-2.0
"""Three commands run without a clone, from a package that pip builds of this repository."""

import os
import sys

from launching import REPO, run


def test_the_installed_commands_run_in_any_folder(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    package = tmp_path / "package"
    run(*pip, "--target", package, REPO)
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_foward: true}"
    (tmp_path / "mine.yaml").write_text(text)

    def command(*words, code=0):
        program = package / "bin" / "accelerate-recipes"
        environment = os.environ | {"PYTHONPATH": str(package)}
        return run(program, *words, cwd=tmp_path, env=environment, code=code).output

    assert "fix: fsdp_reshard_after_forward" in command("check", "mine.yaml", code=65)
    assert "Will it fit?" in command("plan", "--help")
    command("copy", "llama", "copied")
    assert (tmp_path / "copied" / "core" / "run.py").is_file()
    assert "version 0" in (tmp_path / "copied" / "ORIGIN.md").read_text()
    assert "usage" in command("train", code=64)
