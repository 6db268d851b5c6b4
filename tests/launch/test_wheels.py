# SPDX-License-Identifier: Apache-2.0
"""pip installs a wheel that was trimmed."""

import subprocess
import sys

import pytest

from gpu import wheels
from wheel_files import make_wheel


@pytest.mark.cold("pip is no program of this project")
def test_a_trimmed_wheel_can_be_installed(tmp_path):
    wheel = make_wheel(tmp_path)
    wheels.trim_bitsandbytes(wheel, "130")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", target, wheel], check=True)
    assert "trimmed" in (target / "bitsandbytes" / "__init__.py").read_text()
