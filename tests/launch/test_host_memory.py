# SPDX-License-Identifier: Apache-2.0
"""Under FSDP a host holds one copy of the model while it loads, and a rank its share of a save.

Measured with real ranks.
"""

import pytest

from measured import host_memory, save_memory
from publish.saving import is_kept

pytestmark = pytest.mark.cold("a process that starts warm has the server's pages in its memory")


@pytest.fixture(scope="module")
def tiny_in_bf16(tmp_path_factory):
    """A model whose files are in bf16, and its number of parameters."""
    folder = tmp_path_factory.mktemp("host_memory")
    return folder, host_memory.make_model_and_rows(folder)


def test_rank_0_loads_and_the_others_take_no_memory_for_the_weights(tiny_in_bf16, tmp_path):
    folder, size = tiny_in_bf16
    row = host_memory.measure("fsdp2_full_shard", 2, folder, size, tmp_path, resumes=False)
    rank_0, rank_1 = row["loading"]
    assert rank_0 == pytest.approx(1.0, abs=0.2)  # the conversion to fp32 cannot stay a mapping
    assert rank_1 < 0.2  # imports and buffers


def test_a_resume_under_fsdp1_makes_no_second_copy(tiny_in_bf16, tmp_path):
    folder, size = tiny_in_bf16
    row = host_memory.measure("fsdp1_full_shard", 2, folder, size, tmp_path, resumes=True)
    # Half of the gradients and of the optimizer's two states; torch's own way takes four copies
    # and more
    assert row["resuming"] == pytest.approx([1.5, 1.5], abs=0.2)


@pytest.mark.parametrize(
    ("config", "words", "kinds"),
    [
        ("fsdp2_full_shard", (), ("checkpoint", "folder")),
        # What each rank holds on the host anyway is copied only for a save in the background
        ("ddp", save_memory.IN_BACKGROUND, ("checkpoint",)),
    ],
)
def test_a_save_takes_a_share_and_at_most_twice_the_largest_tensor(config, words, kinds, tmp_path):
    models = tmp_path / "models"
    save_memory.make_models(models)
    mesh = save_memory.mesh_of(config, 2)
    row = save_memory.measure_run(mesh, models, tmp_path / "launch", words)
    for kind in kinds:
        assert is_kept(row[kind])
        for grown, share in zip(row[kind]["grown"], row[kind]["shares"], strict=True):
            assert grown > 0.9 * share > 0  # Otherwise nothing was measured.
