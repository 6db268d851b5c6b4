# SPDX-License-Identifier: Apache-2.0
"""What may differ between two forms of a model, and what is an error."""

import json
import math
from dataclasses import replace

import pytest
import torch

from merging.comparing import compare, largest_gap, largest_logit
from merging.contestants import Contestant
from merging.receipt import Receipt, find_changed_files, hash_files

BOUND = 0.01  # relative to the largest logit, which is 10
LOGITS = torch.tensor([[0.0, 10.0, 9.95], [5.0, 0.0, 1.0]])  # two places, three tokens


@pytest.fixture
def trained():
    """A contestant with one prompt, whose answer is the tokens 1 and 0."""
    return Contestant(
        name="trained",
        dtype="float32",
        rendered=["<user>é"],
        prompts=[[7, 8]],
        tokens=[[1, 0]],
        logits=[LOGITS],
        stop_tokens=frozenset([0]),
    )


def problems_of(trained, **changes):
    return compare(trained, replace(trained, name="other", **changes), BOUND).problems


def test_the_same_has_no_problem(trained):
    comparison = compare(trained, replace(trained, name="other"), BOUND)
    assert comparison.problems == ()
    assert (comparison.gap, comparison.same_answers, comparison.same_prompts) == (0, 1, 1)
    assert comparison.bound == pytest.approx(0.1)


@pytest.mark.parametrize(("shift", "is_wrong"), [(0.09, False), (0.11, True)])
def test_a_logit_may_differ_up_to_the_bound(trained, shift, is_wrong):
    found = problems_of(trained, logits=[LOGITS + shift])
    assert bool(found) == is_wrong
    assert not found or "a logit differs by 0.11, and the bound is 0.1" in found[0]


def test_what_is_not_a_number_is_an_error(trained):
    logits = LOGITS.clone()
    logits[0, 0] = float("nan")
    assert "a logit differs by nan" in problems_of(trained, logits=[logits])[0]


def test_a_receipt_without_numbers_is_still_json(trained, tmp_path):
    broken = replace(trained, logits=[LOGITS * float("nan")])
    assert math.isnan(largest_logit(broken))
    receipt = Receipt({}, broken, gap_without_adapters=float("nan"))
    receipt.add(replace(broken, name="other"), BOUND)
    receipt.write(tmp_path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((tmp_path / "receipt.json").read_text(), parse_constant=refuse)
    assert not content["passed"] and content["reference"]["largest_logit"] is None
    assert content["comparisons"][0]["bound"] is None


def test_another_vocabulary_is_an_error(trained):
    wider = torch.cat([LOGITS, LOGITS[:, :1]], dim=1)
    assert largest_gap(trained, replace(trained, logits=[wider])) == float("inf")
    assert "a logit differs by inf" in problems_of(trained, logits=[wider])[0]


def test_of_two_tokens_that_are_nearly_as_likely_either_may_come_first(trained):
    assert problems_of(trained, tokens=[[2, 2]]) == ()
    assert compare(trained, replace(trained, tokens=[[2, 2]]), BOUND).same_answers == 0


@pytest.mark.parametrize("answer", [[0, 0], [1, 2], [1], [1, 0, 0]])
def test_another_answer_is_an_error_where_the_logits_decide(trained, answer):
    assert "the answer to prompt 1 differs from token" in problems_of(trained, tokens=[answer])[0]


@pytest.mark.parametrize("text", ["<user>e\u0301", "<user>é ", ""])
def test_prompts_are_compared_byte_for_byte(trained, text):
    (problem,) = problems_of(trained, rendered=[text])
    assert "the template writes prompt 1 as" in problem and "<user>é" in problem


def test_other_tokens_of_the_same_text_are_an_error(trained):
    assert "makes other tokens" in problems_of(trained, prompts=[[7, 9]])[0]


@pytest.mark.parametrize(
    ("ends", "is_wrong"), [([0], False), ([0, 5], False), ([5], True), ([], True)]
)
def test_no_end_token_may_be_missing(trained, ends, is_wrong):
    found = problems_of(trained, stop_tokens=frozenset(ends))
    assert bool(found) == is_wrong and (not found or "end tokens [0]" in found[0])


def test_a_program_without_logits_is_compared_by_its_answers(trained):
    comparison = compare(trained, replace(trained, logits=None, stop_tokens=None), BOUND)
    assert comparison.gap is None and comparison.problems == ()
    assert comparison.to_json()["largest_logit_gap"] is None


def test_a_receipt_keeps_what_it_compared(trained, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"123")
    receipt = Receipt({"made_by": "a test"}, trained)
    receipt.add(replace(trained, name="same"), BOUND)
    assert receipt.write(tmp_path)["passed"]
    assert list(find_changed_files(tmp_path)) == []
    receipt.add(replace(trained, name="other", logits=[LOGITS + 1]), BOUND)
    content = receipt.write(tmp_path)
    assert not content["passed"] and len(content["problems"]) == 1
    assert content["files"] == hash_files(tmp_path) and content["files"]["model.bin"]["bytes"] == 3
    assert content["greedy_tokens"] == dict.fromkeys(("trained", "same", "other"), [[1, 0]])
    lines = receipt.table()
    assert len(lines) == 4 and "1/1 same" in lines[-1] and "1.00e+00" in lines[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_bytes(b"124"), "model.bin is not the file"),
        (lambda path: path.unlink(), "model.bin is missing"),
        (lambda path: path.with_name("receipt.json").write_text("{}"), "not a receipt"),
    ],
    ids=["changed", "gone", "no receipt"],
)
def test_hashes_show_what_changed(change, says, trained, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"123")
    Receipt({}, trained).write(tmp_path)
    change(tmp_path / "model.bin")
    (problem,) = find_changed_files(tmp_path)
    assert says in problem
