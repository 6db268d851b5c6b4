# SPDX-License-Identifier: Apache-2.0
"""scripts/check_config.py: its exit codes, and what it prints for people and programs."""

import json

import pytest

import check_config
from broken_configs import DDP, FSDP1, FULL2, ZERO


@pytest.mark.parametrize(
    ("text", "flags", "code"),
    [
        (FULL2, "--recipes --strict", 0),
        (FSDP1 + "  fsdp_versoin: 2\n", "", 65),
        (ZERO, "", 0),  # no stage is a warning
        (ZERO, "--strict", 65),
        (ZERO + "  gradient_clipping: 1.0\n", "", 0),
        (ZERO + "  gradient_clipping: 1.0\n", "--recipes", 65),
        (DDP.replace("MULTI_GPU", '"NO"').replace("8", "1"), "--num_processes 4", 65),
        ("{}", "", 0),
        ("[1", "", 65),
        ('{"zero_optimization": {"stage": 2}, "gradient_cliping": 1}', "", 65),
        (FULL2, "--no_such_flag", 64),
    ],
)
def test_exit_codes(text, flags, code, tmp_path, in_process):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    done = in_process(check_config, path, *flags.split(), "--json")
    assert done.code == code
    if code == 65:
        [report] = json.loads(done.out)
        assert report["file"] == str(path) and report["findings"]
