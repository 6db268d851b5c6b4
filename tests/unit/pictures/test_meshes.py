# SPDX-License-Identifier: Apache-2.0
"""The picture of meshes, and the recording behind it, say what the strategies promise."""

import pytest

from pictures.meshes import RANKS, SHOWN, run_of
from pictures.recordings import read_recordings
from publish import meshes

RECORDING = read_recordings()["meshes"]
MODELS = RECORDING["models"]
WHOLE_PARAMETERS = MODELS["llama"]["bytes"]["parameters"][0]
UP = "layers.0.mlp.up_proj"


def recorded(config):
    return next(run for run in RECORDING["runs"] if run["config"] == config)


def area(box):
    top, left, bottom, right = box
    return (bottom - top) * (right - left)


@pytest.mark.parametrize(
    "run", RECORDING["runs"], ids=lambda run: " ".join([run["config"], *run["flags"]])
)
def test_the_ranks_of_a_mesh_have_all_weights_and_each_token_between_them(run):
    for name, (height, width) in MODELS[run["model"]]["matrices"].items():
        corners = {tuple(held[name]) for held in run["held"] if name in held}
        assert sum(area(box) for box in corners) == height * width
    for row, length in enumerate(RECORDING["rows"]):
        spans = {tuple(span) for rank in run["tokens"] for span in rank.get(str(row), ())}
        assert sum(end - first for first, end in spans) == length


@pytest.mark.parametrize("config", ["fsdp2_cp", "deepspeed_ulysses"])
def test_ranks_that_share_rows_have_different_tokens_and_use_whole_matrices(config):
    run = recorded(config)
    first, second = run["tokens"][:2]
    assert first.keys() == second.keys()
    assert first != second
    assert all(used[UP] == [0, 0, 640, 320] for used in run["used"])


def test_ranks_of_a_tensor_parallel_group_see_the_same_rows_with_other_columns():
    run = recorded("tp")
    assert all(tokens == run["tokens"][0] for tokens in run["tokens"])
    assert run["used"] == run["held"]
    assert len({tuple(used[UP]) for used in run["used"]}) == RANKS


def test_ranks_that_share_experts_have_rows_of_their_own_and_use_the_experts_they_have():
    spread, sharded = recorded("ep"), recorded("fsdp2_ep")
    for run in (spread, sharded):
        assert len({tuple(tokens) for tokens in run["tokens"]}) == RANKS
    assert spread["used"] == spread["held"]
    assert [used[UP] for used in spread["used"]] == [
        [128 * rank, 0, 128 * (rank + 1), 320] for rank in range(RANKS)
    ]
    # The ranks with the same two experts hold one each, and gather both
    assert [used[UP] for used in sharded["used"]] == 2 * [[0, 0, 256, 320], [256, 0, 512, 320]]
    assert [held[UP][0] for held in sharded["held"]] == [0, 256, 128, 384]


def test_what_is_drawn_was_recorded_on_four_ranks():
    for shown in SHOWN:
        assert run_of(RECORDING, shown)["ranks"] == RANKS


def test_a_run_that_was_not_recorded_is_an_error():
    with pytest.raises(ValueError, match="no run of"):
        run_of(RECORDING | {"runs": []}, SHOWN[0])


def test_the_table_has_the_fullest_rank_and_its_share():
    assert meshes.share_of([40, 50], [200]) == "50 (25.0%)"
    text = meshes.mesh_bytes_block({"curves": {"meshes": RECORDING}})
    assert f"{WHOLE_PARAMETERS:,} (100.0%)" in text
    assert len(text.splitlines()) == len(RECORDING["runs"]) + 2
