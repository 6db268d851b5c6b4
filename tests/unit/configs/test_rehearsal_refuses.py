"""The rehearsal refuses a config of which accelerate would ignore something."""

import json
import sys

import pytest
import yaml

import rehearse
from accelerate_judge import write
from broken_configs import DDP, DEEPSPEED_JSON, FSDP1, ZERO_BY_JSON
from launching import CONFIGS

SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture
def read_config(monkeypatch):
    """A function from a path to what the rehearsal reads there."""

    def read(path):
        words = ["rehearse.py", "--config_file", str(path), "recipes/llama.py"]
        monkeypatch.setattr(sys, "argv", words)
        parser, args = rehearse.parse_args()
        return rehearse.read_config(parser, args.config_file)

    return read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n", "FULL_SHARD runs, not NO_SHARD"),
        (DDP + "num_processes: 4\n", "written twice"),
        (ZERO_BY_JSON + "  deepspeed_config_file: ds.json\n", "beside this file"),
    ],
)
def test_what_accelerate_would_ignore_is_refused(text, words, tmp_path, read_config, capsys):
    write(tmp_path, json.dumps(DEEPSPEED_JSON), "ds.json")
    with pytest.raises(SystemExit) as stopped:
        read_config(write(tmp_path, text))
    assert stopped.value.code == 64
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_taken_for_what_it_is(path, read_config):
    written = yaml.safe_load(path.read_text())
    assert rehearse.strategy_of(read_config(path)) == rehearse.strategy_of(written)
