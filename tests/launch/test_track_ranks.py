# SPDX-License-Identifier: Apache-2.0
"""The planner's peak under three engines, against the live tensors of two ranks."""

import pytest

from measured import live_peaks, rehearsals


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    live_peaks.make_model_and_rows(folder)
    return folder


@pytest.mark.parametrize(
    "config, job",
    [
        ("fsdp1_full_shard", "plain"),
        ("fsdp1_full_shard", "LoRA head"),
        ("deepspeed_zero2", "short"),
        ("deepspeed_zero3", "plain"),
    ],
)
def test_the_peak_is_that_of_live_tensors(config, job, tiny, tmp_path):
    row = live_peaks.compare(live_peaks.measure(config, job, tiny, tmp_path / "run"))
    assert abs(row["error"]) < 0.05, row
    assert abs(row["beside_bucket"]) < 0.05, row


@pytest.mark.parametrize(
    "mesh",
    [
        rehearsals.Mesh("fsdp2_tp", 4),
        rehearsals.Mesh("fsdp2_cp", 2, ("dp_shard_size=1",)),
        rehearsals.Mesh("deepspeed_ulysses", 2),
        rehearsals.Mesh("fsdp2_ep", 4, ep=2),
    ],
    ids=lambda mesh: mesh.config,
)
def test_the_peak_of_ranks_of_a_mesh_is_that_of_live_tensors(mesh, tiny, tmp_path):
    row = live_peaks.compare(live_peaks.measure_mesh(mesh, "plain", tiny, tmp_path / "run"))
    assert abs(row["error"]) < 0.05, row
    assert abs(row["beside_bucket"]) < 0.05, row
