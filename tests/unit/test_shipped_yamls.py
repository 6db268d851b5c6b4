# SPDX-License-Identifier: Apache-2.0
"""Each shipped YAML says when to choose it; tests/launch/test_cells.py shows what it does."""

import pytest
import yaml

from launching import CONFIGS
from paths import FIRST_CHOICE, SAME_AS_FIRST_CHOICE


def test_the_yaml_to_start_with_is_a_file_with_the_content_of_fsdp2_full_shard():
    assert not any(path.is_symlink() for path in CONFIGS.glob("*.yaml"))  # a download lacks it
    assert FIRST_CHOICE.read_bytes() == SAME_AS_FIRST_CHOICE.read_bytes()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_it_is_in_bf16_and_says_when_to_choose_it(path):
    content = yaml.safe_load(path.read_text())
    assert content["mixed_precision"] == "bf16" and content["num_processes"] >= 1
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header) >= 3 and "Choose it" in " ".join(header)
