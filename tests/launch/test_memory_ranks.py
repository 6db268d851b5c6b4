"""The planner's peak under three engines, against the live tensors of two ranks (scripts/track_ranks.py)."""

import pytest

import track_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    track_ranks.make_model(folder)
    return folder


@pytest.mark.parametrize(
    "config, job",
    [
        ("fsdp1_full_shard", "plain"),
        ("deepspeed_zero2", "short"),
        ("deepspeed_zero3", "plain"),
    ],
)
def test_the_peak_is_that_of_live_tensors(config, job, model, tmp_path):
    row = track_ranks.compare(track_ranks.measure(config, job, model, tmp_path / "run"))
    assert abs(row["error"]) < 0.05 and abs(row["beside_bucket"]) < 0.05, row
