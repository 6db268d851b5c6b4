# SPDX-License-Identifier: Apache-2.0
"""`make quickstart` teaches a tiny model, offline and on a CPU, and the trained model answers."""

import re

from launching import quickstart, read_json, read_metrics, script


def test_llama_learns_its_skills_and_answers(tmp_path):
    output = quickstart("llama", tmp_path)
    assert output.count("exact match: ") == 2
    assert "Warning: " not in output  # from any library
    assert set(re.findall(r"[\x00-\x1f\x7f-\x9f]", output)) <= {"\n", "\r", "\t"}
    before, after = (read_json(tmp_path / f"{name}.json") for name in ("before", "after"))
    assert before["exact_match"] < 0.2 and after["exact_match"] >= 0.9
    assert len(after["skills"]) == 7
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(evaluations) == 2 and evaluations[-1]["eval_loss"] < 0.1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = read_json(tmp_path / "run" / "run.json")
    assert record["arguments"]["learning_rate"] == 2e-3 and len(record["data"]) == 32
    assert {"torch", "accelerate", "transformers"} <= set(record["versions"])
    done = script("generate", tmp_path / "run", "--prompt", "Spell the word tiger.", code=0)
    assert "t-i-g-e-r" in done.output
