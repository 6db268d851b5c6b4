# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of what ranks send gives what each paper says, and nothing on a single rank."""

from dataclasses import replace

import pytest

from proof import traffic
from proof.traffic import OF_8B, TRAFFIC, Layer
from publish.meshes import SENT, mesh_traffic_block

# 4 ranks, 8 tokens, hidden states of 16, keys of 4, 100 parameters, 2 bytes an element
SMALL = Layer(ranks=4, tokens=8, width=16, kv_width=4, parameters=100)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (traffic.bytes_of_shards, 3 / 4 * 100 * (2 + 2 + 4)),
        (traffic.bytes_of_matrices, 7 * 2 * 3 / 4 * 8 * 16 * 2),
        (traffic.bytes_of_ring, 2 * 8 * 4 * (2 * 3 / 4 * 2 + 4)),
        (traffic.bytes_of_heads, 2 * (3 / 4) * (8 / 4) * 2 * (16 + 4) * 2),
        (traffic.bytes_of_experts, 4 * 3 / 4 * 8 * 2 * 16 * 2),
        (traffic.bytes_of_border, 2 * 8 * 16 * 2),
    ],
)
def test_each_kind_sends_what_its_formula_says(count, expected):
    assert count(SMALL) == expected


def test_only_shards_do_not_depend_on_the_tokens():
    longer = replace(OF_8B, tokens=2 * OF_8B.tokens)
    for kind, count in TRAFFIC.items():
        factor = 1 if kind.startswith("FSDP2") else 2
        assert count(longer) == factor * count(OF_8B)


def test_more_ranks_send_less_each_under_ulysses_alone():
    more = replace(OF_8B, ranks=2 * OF_8B.ranks)
    less = {kind for kind, count in TRAFFIC.items() if count(more) < count(OF_8B)}
    assert less == {"SP"}


def test_the_layer_is_that_of_llama_3_1_8b():
    width, keys, inner = 4096, 1024, 14336
    matrices = 2 * width * width + 2 * width * keys + 3 * width * inner
    assert OF_8B.parameters == matrices + 2 * width


def test_the_table_names_each_kind_once():
    assert SENT.keys() == TRAFFIC.keys()
    lines = mesh_traffic_block({}).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(TRAFFIC)
