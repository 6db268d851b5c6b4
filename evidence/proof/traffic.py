# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rank sends for a layer under each kind of parallelism, by arithmetic.

The formulas are those of the papers that introduced each kind, with the collectives that run here.
Of m bytes on each of n ranks, a ring sends 2 (n - 1) / n m for an all-reduce, and (n - 1) / n m for
an all-gather of m in all, for a reduce-scatter of m, and for an all-to-all of m.
"""

from collections.abc import Callable
from dataclasses import dataclass

FP32 = 4  # bytes of a gradient between ranks, which upstream.reduce_in_fp32 keeps in fp32


@dataclass(frozen=True)
class Layer:
    """A layer of a model, what goes through it, and the ranks that share them.

    Attributes:
        ranks: that share the weights, the rows or the layers.
        tokens: of a micro-batch, those of all ranks that share its rows.
        width: of the hidden states.
        kv_width: of the keys of a token: key-value heads times the width of a head.
        parameters: of the layer.
        itemsize: bytes of an element in which the layer computes.
        experts: to which each token goes, under EP; its ranks have rows of their own.
    """

    ranks: int
    tokens: int
    width: int
    kv_width: int
    parameters: int
    itemsize: int = 2
    experts: int = 2

    @property
    def others(self) -> float:
        """The share that is on other ranks, (n - 1) / n."""
        return (self.ranks - 1) / self.ranks


def bytes_of_shards(layer: Layer) -> float:
    """FSDP and ZeRO-3: gather the weights in both passes, and reduce-scatter their gradients.

    Rajbhandari and others, ZeRO, arXiv 1910.02054, section 7.2.
    """
    return layer.others * layer.parameters * (2 * layer.itemsize + FP32)


def bytes_of_matrices(layer: Layer) -> float:
    """TP: all-reduce the outputs of attention and MLP, and the gradients of the inputs of matrices.

    Shoeybi and others, Megatron-LM, arXiv 1909.08053, section 3, adds up the gradients of an input
    first, and has four all-reduces. transformers/distributed/tensor_parallel.py, ColwiseParallel,
    has one for each of the five matrices that are split by columns.
    """
    all_reduces = 2 + 5
    hidden = layer.tokens * layer.width * layer.itemsize
    return all_reduces * 2 * layer.others * hidden


def bytes_of_ring(layer: Layer) -> float:
    """CP: all keys and values in both passes, and their gradients once around, in fp32.

    Liu and others, Ring Attention, arXiv 2310.01889, section 3; torch/distributed/tensor/
    experimental/_context_parallel/_attention.py sends the gradients once in each of n steps.
    """
    elements = 2 * layer.tokens * layer.kv_width
    return elements * (2 * layer.others * layer.itemsize + FP32)


def bytes_of_heads(layer: Layer) -> float:
    """SP: all-to-alls of queries, keys, values and outputs, in both passes.

    Jacobs and others, DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2.
    """
    own_tokens = layer.tokens / layer.ranks
    elements = own_tokens * 2 * (layer.width + layer.kv_width)
    return 2 * layer.others * elements * layer.itemsize


def bytes_of_experts(layer: Layer) -> float:
    """EP: all-to-alls of tokens to their experts and of results back, in both passes.

    Lepikhin and others, GShard, arXiv 2006.16668, section 3; tokens are those of one rank.
    """
    hidden = layer.tokens * layer.experts * layer.width * layer.itemsize
    return 4 * layer.others * hidden


def bytes_of_border(layer: Layer) -> float:
    """PP: hidden states to the next stage, and their gradients back, once a stage.

    Harlap and others, PipeDream, arXiv 1806.03377, section 3.
    """
    return 2 * layer.tokens * layer.width * layer.itemsize


# A layer of Llama 3.1 8B, of which 8 ranks share the weights, the rows or the layers
OF_8B = Layer(ranks=8, tokens=8192, width=4096, kv_width=1024, parameters=218_112_000)
TRAFFIC: dict[str, Callable[[Layer], float]] = {
    "FSDP2, ZeRO-3": bytes_of_shards,
    "TP": bytes_of_matrices,
    "CP": bytes_of_ring,
    "SP": bytes_of_heads,
    "EP": bytes_of_experts,
    "PP": bytes_of_border,
}
