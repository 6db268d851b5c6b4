# SPDX-License-Identifier: Apache-2.0
"""--dry_run reports all that a start would, loads no weights and writes nothing.

A run that is done is left as it is.
"""

import shutil

from launching import recipe, rehearse
from net import data_of


def changes_of_files(folder):
    """When each file of a run was last changed, but for hidden ones, such as a lock."""
    files = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_dry_run_prints_the_summary_and_writes_nothing(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    words = [*data_of(copy), "--use_peft", "--output_dir", tmp_path / "run", "--dry_run"]
    done = rehearse("fsdp", *words, code=0)
    for said in ("FSDP2 FULL_SHARD, 2 x cpu", "LoRA adapters", "[["):
        assert said in done.output
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_done_is_left_as_it_is(tiny, tmp_path):
    """Also without a checkpoint."""
    job = [*data_of(tiny), "--output_dir", tmp_path / "run", "--save_steps", 0]
    recipe(*job, "--max_steps", 2, code=0)
    before = changes_of_files(tmp_path / "run")
    for words in (["--dry_run"], []):
        assert "Trained in" not in recipe(*job, "--max_steps", 2, *words, code=0).output
        assert changes_of_files(tmp_path / "run") == before
    assert "max_steps" in recipe(*job, "--max_steps", 3, code=64).output
    done = recipe(*job, "--max_steps", 3, "--resume_from_checkpoint", "none", code=0)
    assert "Trained in" in done.output
