# SPDX-License-Identifier: Apache-2.0
"""scripts/check_config.py: its exit codes and what it prints."""

import copy
import json
import random
import re
import sys

import pytest

import check_config
from accelerate_judge import write
from broken_configs import DDP, DEEPSPEED_JSON, FSDP, FSDP1, FSDP2, FULL2, ZERO_WITHOUT_PRECISION
from launching import CONFIGS

SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture
def check(monkeypatch):
    """A function from the words of a call to its exit code."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["check_config.py", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            check_config.main()
        return stopped.value.code

    return call


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_passes_and_every_key_has_an_effect(path, check, capsys):
    assert check(path, "--recipes", "--strict") == 0
    said = capsys.readouterr().out
    assert "no effect    none of the keys" in said
    assert "warning" not in said


# accelerate by itself cannot deal with tensor parallelism under FSDP2.
ONLY_FOR_THE_RECIPES = ("fsdp2_tp", "hsdp_tp")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_passes_for_other_scripts_unless_only_the_recipes_can_run_it(
    path, check, capsys
):
    passes = check(path, "--strict") == 0
    assert passes == (path.stem not in ONLY_FOR_THE_RECIPES)
    said = capsys.readouterr().out
    assert said.count("error: ") == (not passes)
    assert passes or "parallelism_config_tp_size: accelerate 1.15 with transformers 5 stops" in said


@pytest.fixture
def files(tmp_path):
    """A right file, a wrong one, and one that works but costs, by name."""
    return {
        "good": write(tmp_path, FULL2, "good.yaml"),
        "bad": write(tmp_path, FSDP1 + "  fsdp_versoin: 2\n", "bad.yaml"),
        "costly": write(tmp_path, DDP + "enable_cpu_affinity: true\n", "costly.yaml"),
        "missing": tmp_path / "none.yaml",
        "folder": tmp_path,
    }


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("{good}", 0),
        ("{costly}", 0),
        ("{costly} --strict", 65),
        ("{good} {bad}", 65),
        ("{missing}", 64),
        ("{good} --no_such_flag", 64),
        ("{folder}", 64),
        ("{good} --num_processes 0", 64),
        ("{good} --num_processes -1", 64),
    ],
)
def test_exit_codes(call, code, files, check, capsys):
    assert check(*call.format(**files).split()) == code
    assert "Traceback" not in capsys.readouterr().err


NO_YAML = ("", "- a\n- b\n", "a: [1\n", "just text\n", "\t\tx: 1", b"\xff\xfe", b"\x00\x01")
NOT_UTF8 = "mixed_precision: caf\xe9".encode("latin1")
WRONG_TAGS = ("a: !!timestamp b", "a: !!int ''", "a: =", FSDP + "  <<: 1\n")
TOO_DEEP = ("[" * 800, "a: " + "[" * 30 + "]" * 30)
WITHOUT_END = FSDP2.replace("fsdp_config:", "fsdp_config: &a") + "  x: *a\n"
TOO_LONG = "".join(f"key_{n}: {n}\n" for n in range(5000))
ALIASES = "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 18))
TOO_LARGE = (WITHOUT_END, TOO_LONG, "a0: &a0 {x: 1}\n" + ALIASES)


@pytest.mark.parametrize("text", [*NO_YAML, NOT_UTF8, *WRONG_TAGS, *TOO_DEEP, *TOO_LARGE])
def test_what_is_no_config_is_bad_data(text, tmp_path, check, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert check(path) == 65
    assert "config.yaml: error: file: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("base_model: m\ndatasets: []\nfsdp_version: 2\nfsdp_config: {}\n", "axolotl"),
        ("model_name_or_path: m\nstage: sft\nfinetuning_type: lora\n", "LLaMA-Factory"),
        ("model_name_or_path: m\ndataset_name: rows\n", "a training script"),
    ],
)
def test_a_file_of_another_program_is_named(text, program, tmp_path, check, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert check(path) == 65
    said = capsys.readouterr().out
    assert f" is of {program}" in said and said.count("error: ") == 1


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n", "indent with spaces"),
        (DDP + "---\n" + FSDP2, "keep one of the documents"),
        (DDP.replace("8", "{{ num_gpus }}"), "fill it in first"),
    ],
)
def test_text_that_cannot_be_read_comes_with_what_to_do(text, hint, tmp_path, check, capsys):
    path = write(tmp_path, text)
    assert check(path) == 65
    assert hint in capsys.readouterr().out


EMPTY_SECTIONS = FULL2 + "parallelism_config:\ndeepspeed_config: null\nmpirun_config: ~\n"
ODD_KEYS = (
    DDP + "1: a\n2020-01-01: b\nnull: c\ntrue: d\n",
    FULL2 + "  ? 5\n  : 6\n",
    DDP + "".join(f"ky_{n}: {n}\n" for n in range(400)),
)
ODD_VALUES = (
    DDP + "num_processes: 2\ngpu_ids: {2020-01-01: [x]}\n",
    DDP + "gpu_ids: [': [']\nmixed_precision: '{'\n",
    DDP + 'x: "\\ud800"\n',
)


@pytest.mark.parametrize("text", [EMPTY_SECTIONS, *ODD_KEYS, *ODD_VALUES])
def test_odd_keys_and_values_are_judged(text, tmp_path, check):
    path = write(tmp_path, text)
    assert check(path) == (0 if text == EMPTY_SECTIONS else 65)
    assert check(path, "--num_processes", 4, "--json") in (0, 65)


def test_a_file_that_points_to_itself_is_read_once(tmp_path, check):
    for name, data in (
        ("a.json", DEEPSPEED_JSON),
        ("b.json", {"distributed_type": "DEEPSPEED", "num_processes": 8}),
        ("c.yaml", {"distributed_type": "DEEPSPEED"}),
    ):
        itself = {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / name)}}
        assert check(write(tmp_path, json.dumps(data | itself), name)) == 65


def test_processes_of_the_command_line_count(tmp_path, check, capsys):
    path = write(tmp_path, "distributed_type: 'NO'\nnum_processes: 1\n")
    assert check(path) == 0
    assert check(path, "--num_processes", 4) == 65
    assert "one process runs, not 4" in capsys.readouterr().out


NOISE = (
    "",
    "x",
    ":",
    "\n",
    "  ",
    "{",
    "[",
    "- ",
    "&a ",
    "*a",
    "#",
    "'",
    "\t",
    "null",
    "0",
    "-1",
    "\x00",
    "\ud800",
    "all that is before",
)


def damaged(text, chosen):
    """The text with a random damage at a random place."""
    where = chosen.randrange(len(text))
    length = chosen.choice([0, 1, 1, 8, 40])
    noise = chosen.choice(NOISE)
    if noise == "all that is before":
        noise = text[:where]
    return text[:where] + noise + text[where + length :]


def test_broken_copies_of_the_shipped_files_get_an_answer(tmp_path, check, capsys):
    chosen = random.Random(0)
    for number in range(100):
        text = chosen.choice(SHIPPED).read_text()
        for _ in range(chosen.randint(1, 4)):
            text = damaged(text, chosen)
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert check(path) in (0, 65), text
        assert str(path) in capsys.readouterr().out, text


def test_json_tells_programs_the_same(tmp_path, check, capsys):
    path = write(tmp_path, FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n")
    assert check(path, "--json") == 65
    (report,) = json.loads(capsys.readouterr().out)
    assert report["does"]["runs"] == "FSDP1 FULL_SHARD"
    (found,) = report["findings"]
    assert (found["severity"], found["kind"], found["line"]) == ("error", "ignored", 7)


class TestDeepSpeedJson:
    @pytest.fixture
    def named(self, tmp_path):
        """A DeepSpeed JSON with a misspelt key and one that the recipes own."""
        wrong = {"optimizer": {"type": "AdamW"}, "train_batch_sise": 8}
        data = copy.deepcopy(DEEPSPEED_JSON) | wrong
        return write(tmp_path, json.dumps(data, indent=1), "ds.json")

    def test_it_is_checked_with_its_yaml(self, named, tmp_path, check, capsys):
        path = write(tmp_path, ZERO_WITHOUT_PRECISION + f"  deepspeed_config_file: {named}\n")
        assert check(path) == 65
        said = capsys.readouterr().out
        for words in ("DeepSpeed ZeRO-3", "parameters on cpu", "bf16 weights"):
            assert words in said
        line = 1 + named.read_text().splitlines().index(' "train_batch_sise": 8')
        finding = rf"ds.json:{line}: error: train_batch_sise: .*\n    fix: train_batch_size"
        assert re.search(finding, said)

    def test_it_is_checked_by_itself(self, named, check, capsys):
        assert check(named, "--recipes") == 65
        assert "train_batch_sise" in capsys.readouterr().out
