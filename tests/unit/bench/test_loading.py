# SPDX-License-Identifier: Apache-2.0
"""Memory of all ranks while they load a model: what is counted, and as what."""

import mmap
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from bench import loading
from bench.loading import MIXTURE, SHAPE, Cell, Sample, copies_of
from bench.loading_tables import NOT_MEASURED, block
from measured.rehearsals import Mesh
from paths import CONFIGS, FIRST_CHOICE

SIZE = 100  # bytes of a copy of the model
# A host of two ranks in which rank 0 reads the weights at 10 s, and each has half of them at 20 s
ON_HOST = {
    "times": {"begin": 5.0, "loaded": 12.0, "prepared": 22.0},
    "held": {"loaded": 100, "prepared": 50},
    "on_host": True,
}
# Each rank reads all of them to where they stay
TO_DEVICE = {
    "times": {"begin": 5.0, "loaded": 12.0},
    "held": {"loaded": 100},
    "on_host": False,
}


def samples_of(*private, mapped=((1.0, 0, 0), (10.0, 0, 0))):
    kinds = {"private": private, "mapped": mapped}
    return {
        kind: [Sample(time, sizes) for time, *sizes in samples] for kind, samples in kinds.items()
    }


def test_every_shipped_yaml_is_measured_once():
    names = [cell.mesh.config for cell in loading.cells()]
    shipped = set(CONFIGS.glob("*.yaml")) - {FIRST_CHOICE}
    assert sorted(names) == sorted(path.stem for path in shipped)
    assert all(cell.mesh.ranks == 8 for cell in loading.cells() if cell.mesh.config != "single")


@pytest.mark.parametrize(
    ("shape", "config", "model"),
    [(SHAPE, LlamaConfig, LlamaForCausalLM), (MIXTURE, MixtralConfig, MixtralForCausalLM)],
)
def test_parameters_are_counted_as_the_model_has_them(shape, config, model):
    shape = shape | {"num_hidden_layers": 2}
    with torch.device("meta"):
        made = model(config(**shape, tie_word_embeddings=True))
    count = sum(weight.numel() for weight in made.parameters())
    # Without norms and routers: some vectors of 1,024 and 2,048 among matrices
    assert loading.parameters_of(shape) == pytest.approx(count, rel=1e-3)


def test_a_model_has_fewer_layers_where_its_copies_do_not_fit():
    one = 4 * loading.parameters_of(SHAPE | {"num_hidden_layers": 16})
    layers = []
    for copies in (1, 1.5, 4, 1000):
        shape = loading.shape_of(Cell(Mesh("ddp", 8), copies), one)
        layers.append(shape["num_hidden_layers"])
    assert layers == [16, 8, 2, 2]
    assert loading.shape_of(Cell(Mesh("ep", 8, ep=8), 1), one)["num_local_experts"] == 8


def test_a_copy_on_the_host_is_beyond_what_rank_0_holds_and_its_shards_are_not():
    before = [(1.0, 7, 9)]
    preparing = [(20.0, 157, 59), (21.0, 57, 69)]
    samples = samples_of(*before, (10.0, 107, 9), *preparing, (30.0, 999, 9))
    copies = copies_of([ON_HOST, ON_HOST], samples, SIZE)
    assert copies["private"] == 2.0
    assert copies["held"] == 1.0
    assert copies["beyond_rank_0"] == 1.0
    assert copies["beyond_others"] == 0.1  # a tensor in transit


def test_weights_that_are_loaded_to_where_they_stay_are_not_beyond():
    samples = samples_of((1.0, 7, 9), (10.0, 107, 109), (11.0, 107, 129))
    copies = copies_of([TO_DEVICE, TO_DEVICE], samples, SIZE)
    assert copies["held"] == 2.0
    assert copies["beyond_rank_0"] == 0
    assert copies["beyond_others"] == 0.2


def test_a_copy_that_every_rank_makes_on_the_host_is_seen():
    samples = samples_of((1.0, 0, 0), (10.0, 100, 100))
    copies = copies_of([ON_HOST, ON_HOST], samples, SIZE)
    assert copies["beyond_others"] == 1.0


def test_pages_of_files_are_counted_for_all_ranks_together():
    mapped = [(1.0, 5, 5), (10.0, 30, 30), (11.0, 25, 45)]
    copies = copies_of([TO_DEVICE] * 2, samples_of((1.0, 0, 0), (9.0, 0, 0), mapped=mapped), SIZE)
    assert copies["mapped"] == 0.6
    assert copies["samples"] == [1, 2]


def test_without_a_sample_before_loading_there_is_no_figure():
    with pytest.raises(RuntimeError, match="too fast"):
        copies_of([TO_DEVICE], samples_of((10.0, 0)), SIZE)


def test_private_memory_and_pages_of_files_are_told_apart(tmp_path):
    size = 64 * 2**20
    slack = 8 * 2**20  # everything else that this process does
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    private = loading.private_memory(os.getpid())
    mapped = loading.mapped_files(os.getpid())
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert sum(view[:: mmap.PAGESIZE]) == 0
        assert loading.mapped_files(os.getpid()) - mapped == pytest.approx(size, abs=slack)
        assert loading.private_memory(os.getpid()) - private < slack
    own = torch.ones(size // 4)
    assert loading.private_memory(os.getpid()) - private == pytest.approx(size, abs=slack)
    del own


def test_a_process_that_has_ended_has_no_memory():
    with pytest.raises(OSError, match="has ended"):
        loading.size_in("Name:\tpython\nState:\tZ (zombie)\n", "RssAnon")


def test_the_table_says_what_the_host_had_or_that_nothing_was_measured():
    row = {"config": "ddp", "ranks": 8, "parameters": 1_038_690_484, "private": 8.02, "held": 8.0}
    row |= {"beyond_rank_0": 0.003, "beyond_others": 0.004, "mapped": 0.5}
    assert "| `ddp.yaml` | 8     | 1.04B      | 8.02 " in block({"rows": [row]})
    assert "Not measured yet: `single.yaml`, `deepspeed_zero0.yaml`" in block({"rows": [row]})
    assert block(None) == NOT_MEASURED


def test_the_table_is_in_one_order_whatever_was_measured_last():
    names = [cell.mesh.config for cell in loading.cells()]
    row = {"ranks": 8, "parameters": 10**9, "private": 1.0, "held": 1.0, "mapped": 0.5}
    row |= {"beyond_rank_0": 1.0, "beyond_others": 0.1}
    lines = block({"rows": [row | {"config": name} for name in reversed(names)]}).splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == [f"{name}.yaml" for name in names]
