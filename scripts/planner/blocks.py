# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a decoder over sizes, as transformers' models compute it.

Each op is described by what determines memory: the size of its result, and what it keeps for the
backward pass. Local variables matter, since memory is freed with them (ledger.py).

What a layer of Llama keeps follows from that. A token has h features, k in all of its keys and m in
the MLP; attention has a heads. With fused attention, all weights trained and no autocast, each
token takes in each layer

    4 (8 h + 2 k + 4 m + a + 2) bytes in fp32:
        3 h    for each of two norms: its input, what it makes before its weight, and its result
        2 h    queries, and the result of attention
        2 k    keys and values
        4 m    gate before and after its activation, up, and their product
        a + 2  a number per head of the softmax, and a scale per norm
    20 h + 4 k + 8 m + 4 a + 8 bytes in bf16, since norms compute in fp32
    4 h or 2 h bytes with checkpointing: the input of the layer

Rules of thumb, such as 34 h bytes (arXiv 2205.05198), ignore grouped keys, gates and the fp32
inside norms. That is why memory is counted op by op here.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .autograd import FP32, Autograd, Tensor, Weight
from .decoder import Decoder, Experts, Layer, Norm, Projection
from .ledger import Storage
from .loss import HeadLoss
from .mixture import Mixture
from .plan import Plan
from .recipe import logits_mib
from .request import Batch

# The parts of a model besides its layers, as a strategy names them. Within a part, each module with
# a weight that trains is a part of its own, named by that weight.
EMBEDDING = "embedding"
TAIL = "tail"  # final norm, head and loss
Part = Layer | Experts | Weight | str
# around(part, forward, x): forward(x), with what the strategy does before and after it
Around = Callable[[Part, Callable[[Tensor], Tensor], Tensor], Tensor]

TOKEN_IDS = Tensor(0, 8, None)  # the input of the embedding, which is next to nothing
FUSED_FOR_GPUS = ("flex_attention", "varlen")


class ForwardPass(NamedTuple):
    """The loss, and what is held until the backward pass is done."""

    loss: Tensor
    held: tuple[Storage | None, ...]


class Forward:
    """A forward pass over a micro-batch, with the recipe's loss at its end.

    If ranks share rows, the batch is this rank's part of it.
    """

    def __init__(
        self,
        autograd: Autograd,
        decoder: Decoder,
        batch: Batch,
        plan: Plan,
        around: Around,
    ) -> None:
        self.autograd = autograd
        self.decoder = decoder
        self.batch = batch
        self.plan = plan
        self.args = plan.args
        self.around = around
        self.tokens = batch.sequences * batch.length
        self.is_eager = decoder.is_eager
        # Whether the kernel separates packed rows, and limits windows, without a mask
        kernel = plan.args.attn_implementation or ""
        self.is_flash = "flash" in kernel or kernel in FUSED_FOR_GPUS
        spread = [layer.experts for layer in decoder.layers if layer.experts is not None]
        arrived = dict(zip(spread, batch.arrived, strict=True)) if batch.arrived else {}
        self.mixture = Mixture(autograd, plan, self.tokens, decoder.hidden, arrived)
        self.head_loss = HeadLoss(autograd, decoder, logits_mib(plan.args), plan.tp)

    def run(self) -> ForwardPass:
        """Return the loss of the batch, and what is held until the backward pass is done."""
        cosine_and_sine = self.rotary_table()
        mask = self.shared_mask()
        x = self.around(EMBEDDING, self.embed, TOKEN_IDS)
        for layer in self.decoder.layers:
            x = self.around(layer, partial(self.layer, layer), x)
        loss = self.around(TAIL, self.tail, x)
        if self.mixture.has_router_loss:
            loss = self.autograd.add(loss, self.mixture.router_loss())
        self.autograd.end_autocast()
        if self.args.gradient_checkpointing:  # Recomputed layers need the mask again.
            return ForwardPass(loss, (cosine_and_sine, mask))
        return ForwardPass(loss, (cosine_and_sine,))

    # ---- The parts ----
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of the tokens, [tokens, hidden]."""
        return self.module(self.decoder.embedding, self.looked_up, token_ids)

    def looked_up(self, _: Tensor) -> Tensor:
        """Return the rows of the embedding for the tokens."""
        embedding = self.decoder.embedding
        numel = self.tokens * self.decoder.hidden
        x = self.autograd.op(numel, embedding.itemsize, [embedding])
        # The gradient of an embedding whose tokens are split is whole until it is accumulated, or
        # added to that of a head that is tied to it.
        if self.plan.tp > 1:
            whole = embedding.numel * self.plan.tp * embedding.itemsize
            self.autograd.give_whole(x, whole)
        return self.summed(x)

    def layer(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the hidden states after a layer."""
        x = self.attention_block(layer, x)
        return self.mlp_block(layer, x)

    def tail(self, x: Tensor) -> Tensor:
        """Return the loss of hidden states."""
        x = self.norm(self.decoder.norm, x, self.tokens)
        return self.module(self.decoder.head.weight, self.loss, x)

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of hidden states after the final norm."""
        return self.head_loss(x, self.batch.supervised)

    def module(self, weight: Weight, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return forward(x) for a module with a weight, which is a part of its own if it trains."""
        if weight.trains:
            return self.around(weight, forward, x)
        return forward(x)

    def rotary_table(self) -> Storage:
        """Allocate cosine and sine of the positions, which each layer keeps."""
        numel = 2 * self.batch.length * self.decoder.head_dim
        return self.autograd.new(numel, self.decoder.embedding.itemsize)

    # ---- Attention ----
    def attention_block(self, layer: Layer, x: Tensor) -> Tensor:
        """Return x + attention(norm(x))."""
        a = self.self_attention(layer, x)
        if "after attention" in layer.norms:
            a = self.norm(layer.norms["after attention"], a, self.tokens)
        return self.autograd.add(x, a)

    def self_attention(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the output of attention, projected."""
        h = self.norm(layer.norms["before attention"], x, self.tokens)
        a = self.attend(layer, h)
        return self.project(layer.projections["o"], a)

    def attend(self, layer: Layer, h: Tensor) -> Tensor:
        """Return what each token gathers from the others, [tokens, heads x head_dim]."""
        q = self.project(layer.projections["q"], h)
        k = self.project(layer.projections["k"], h)
        v = self.project(layer.projections["v"], h)
        if "q" in layer.norms:
            q, k = self.normed(layer, q, k)
        q, k = self.rotated(q, k)
        if self.is_eager:
            return self.eager_attention(q, k, v)
        return self.fused_attention(q, k, v, self.is_masked(layer))

    def normed(self, layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with a norm over the features of each head."""
        rows_of_q = self.tokens * self.decoder.heads
        rows_of_k = self.tokens * self.decoder.kv_heads
        return (
            self.norm(layer.norms["q"], q, rows_of_q),
            self.norm(layer.norms["k"], k, rows_of_k),
        )

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their rotary positions."""
        return self.rotate(q), self.rotate(k)

    def rotate(self, x: Tensor) -> Tensor:
        """Return x * cosine + rotate_half(x) * sine."""
        ag = self.autograd
        straight = ag.op(x.numel, x.itemsize, [x])
        # The halves are negated and concatenated; backward makes a gradient of each half.
        half = ag.op(x.numel, x.itemsize, [x], scratch=2 * x.numel * x.itemsize)
        half = ag.op(x.numel, x.itemsize, [half])
        return ag.op(x.numel, x.itemsize, [straight, half], shares_gradient=True)

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
        """Return attention by a fused kernel.

        It keeps its inputs, its result, and an fp32 number per token and head (the logarithm of the
        softmax's sum).
        """
        ag = self.autograd
        if masked:
            k, v = self.repeated(q, k, v)
        q, k, v = self.autocasted(q, k, v)
        logsumexp = Tensor(0, FP32, ag.new(self.tokens * self.decoder.heads, FP32))
        kept = [q, k, v, logsumexp]
        if masked:
            kept.append(Tensor(0, 1, self.mask_of_layer(q.itemsize)))
        storage = ag.new(q.numel, q.itemsize)
        kept.append(Tensor(q.numel, q.itemsize, storage))
        scratch = self.scratch_of_ring(q, k)
        out = ag.op(q.numel, q.itemsize, [q, k, v], keeps=kept, storage=storage, scratch=scratch)
        if self.computes_rows_apart:
            out = self.joined(out)
        if self.plan.cp * self.plan.sp == 1:
            return out
        # From another order of tokens or heads to that of the next projection
        return ag.op(out.numel, out.itemsize, [out])

    def scratch_of_ring(self, q: Tensor, k: Tensor) -> int:
        """Return the bytes that a ring takes in the backward pass besides its results.

        It holds the keys and values of all ranks and its own concatenated, the gradients of the
        piece that it computes, and those of keys and values once more, on their way to the next
        rank and from the last one (_templated_ring_attention_backward of torch).
        """
        cp = self.plan.cp
        if cp == 1:
            return 0
        keys_and_values = 2 * k.numel
        gathered = (1 + cp) * keys_and_values
        gradients = q.numel + keys_and_values
        return (gathered + gradients) * q.itemsize + 2 * keys_and_values * FP32

    def joined(self, rows: Tensor) -> Tensor:
        """Return the results of single rows as lines, and these as a batch (attention_by_row)."""
        ag = self.autograd
        lines = ag.op(rows.numel, rows.itemsize, [rows], shares_gradient=True)
        return ag.op(lines.numel, lines.itemsize, [lines], shares_gradient=True)

    def eager_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention in plain PyTorch.

        Each of its ops allocates scores, [heads, sequences, length, length]; the softmax is in
        fp32.
        """
        ag = self.autograd
        k, v = self.repeated(q, k, v)
        q, k, v = self.autocasted(q, k, v)
        numel = self.decoder.heads * self.batch.sequences * self.batch.length**2
        scores = ag.op(numel, q.itemsize, [q, k], keeps=[q, k])
        scores = ag.op(numel, q.itemsize, [scores])  # times the scale
        scores = ag.op(numel, q.itemsize, [scores], shares_gradient=True)  # plus the mask
        scores = ag.cast(scores, FP32)
        scores = self.softmax(scores)
        scores = ag.cast(scores, q.itemsize)
        out = ag.op(q.numel, q.itemsize, [scores, v], keeps=[scores, v])
        return ag.op(q.numel, q.itemsize, [out])  # contiguous

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the softmax in fp32, which keeps its result."""
        storage = self.autograd.new(scores.numel, FP32)
        result = Tensor(scores.numel, FP32, storage)
        return self.autograd.op(scores.numel, FP32, [scores], keeps=[result], storage=storage)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values repeated for each head (repeat_kv), where heads share them.

        Without a mask the fused kernels share them by themselves.
        """
        if self.decoder.heads == self.decoder.kv_heads:
            return k, v
        return self.repeat(q, k), self.repeat(q, v)

    def autocasted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the precision of autocast.

        They have another one if quantized layers made them of an input in fp32.
        """
        ag = self.autograd
        itemsize = ag.autocast_itemsize
        return ag.cast(q, itemsize), ag.cast(k, itemsize), ag.cast(v, itemsize)

    def repeat(self, q: Tensor, x: Tensor) -> Tensor:
        """Return keys or values in the size of the queries; the backward pass expands them too."""
        return self.autograd.op(q.numel, x.itemsize, [x], scratch=q.numel * x.itemsize)

    # ---- Masks ----
    @property
    def computes_rows_apart(self) -> bool:
        """Whether attention takes one row of a sequence after another (row_attention.py)."""
        return self.batch.packed and self.plan.sp > 1 and not self.is_flash

    def is_masked(self, layer: Layer) -> bool:
        """Return whether a fused kernel is given a mask.

        It is if sequences hold several rows, or more tokens than the layer's window. Ranks that
        share each row under sequence parallelism know no windows, and compute rows apart without a
        mask.
        """
        if self.is_flash or self.plan.sp > 1:
            return False
        return self.batch.packed or 0 < layer.window <= self.batch.length

    def shared_mask(self) -> Storage | None:
        """Allocate the mask that all layers share: scores to add if eager, else booleans.

        Under sequence parallelism transformers makes one too, of this rank's part of the tokens,
        which DeepSpeed gives to no layer.
        """
        numel = self.batch.sequences * self.batch.length**2
        if self.is_eager:
            return self.autograd.new(numel, self.decoder.embedding.itemsize)
        is_masked = any(self.is_masked(layer) for layer in self.decoder.layers)
        if is_masked or self.computes_rows_apart:
            return self.autograd.new(numel, 1)
        return None

    def mask_of_layer(self, itemsize: int) -> Storage:
        """Allocate the numbers that each layer makes of the shared mask."""
        return self.autograd.new(self.batch.sequences * self.batch.length**2, itemsize)

    # ---- MLP ----
    def mlp_block(self, layer: Layer, x: Tensor) -> Tensor:
        """Return x + mlp(norm(x))."""
        norm = layer.norms.get("before mlp", layer.norms["before attention"])
        h = self.norm(norm, x, self.tokens)
        m = self.mlp(layer, h)
        if "after mlp" in layer.norms:
            m = self.norm(layer.norms["after mlp"], m, self.tokens)
        return self.autograd.add(x, m)

    def mlp(self, layer: Layer, h: Tensor) -> Tensor:
        """Return what the MLP of a layer puts out, or in its place the experts."""
        if layer.experts is not None:
            return self.experts(layer.experts, h)
        return self.project(layer.projections["down"], self.activated(layer, h))

    def experts(self, experts: Experts, h: Tensor) -> Tensor:
        """Return what the experts put out that the router picks for each token."""
        logits = self.linear(experts.router, h)
        weights = self.mixture.routed(experts, logits)
        return self.around(experts, partial(self.mixture.combined, experts, weights), h)

    def activated(self, layer: Layer, h: Tensor) -> Tensor:
        """Return activation(gate(h)) * up(h), or activation(up(h)) without a gate."""
        if "gate" not in layer.projections:
            return self.activation(layer.projections["up"], h)
        activated = self.activation(layer.projections["gate"], h)
        up = self.project(layer.projections["up"], h)
        return self.autograd.mul(activated, up)

    def activation(self, projection: Projection, h: Tensor) -> Tensor:
        """Return the activation function of a projection, which keeps its input."""
        x = self.project(projection, h)
        return self.autograd.op(x.numel, x.itemsize, [x], keeps=[x])

    # ---- Tensor parallelism ----
    def given_whole(self, x: Tensor) -> Tensor:
        """Return x as a matrix is given it whose result is split: ranks add up its gradients."""
        if self.plan.tp == 1:
            return x
        return self.autograd.op(x.numel, x.itemsize, [x], storage=x.storage)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of what each makes of its part of a matrix."""
        if self.plan.tp == 1:
            return x
        return self.autograd.op(x.numel, x.itemsize, [x], shares_gradient=True)

    # ---- Norms ----
    def norm(self, norm: Norm, x: Tensor, rows: int) -> Tensor:
        """Return a norm of x, which scales each of `rows` rows by one number."""
        return self.module(norm.weight, partial(self.scaled, norm, rows), x)

    def scaled(self, norm: Norm, rows: int, x: Tensor) -> Tensor:
        """Return a norm of x, as its module computes it.

        RMSNorm computes in fp32. Llama's multiplies by its weight in the precision of the input,
        Gemma's in fp32 too. LayerNorm is one kernel, which keeps a mean and a variance per row.
        """
        ag = self.autograd
        weight = norm.weight
        if norm.kind == "layer":
            moments = Tensor(2 * rows, FP32, ag.new(2 * rows, FP32))
            return ag.op(x.numel, x.itemsize, [x, weight], keeps=[x, moments])
        n = self.scaled_to_unit(x, rows)
        if norm.kind == "rms":
            n = ag.cast(n, x.itemsize)
        keeps = []
        scratch = 0
        if weight.trains:
            keeps = [n]
            scratch = n.numel * n.itemsize  # the gradient of the weight before it is summed
        itemsize = max(n.itemsize, weight.itemsize)
        out = ag.op(x.numel, itemsize, [n, weight], keeps=keeps, scratch=scratch)
        if norm.kind == "gemma":
            return ag.cast(out, x.itemsize)
        return out

    def scaled_to_unit(self, x: Tensor, rows: int) -> Tensor:
        """Return x / sqrt(mean(x^2)) in fp32, row by row."""
        ag = self.autograd
        full = x.numel * FP32
        x = ag.cast(x, FP32)
        square = ag.op(x.numel, FP32, [x], keeps=[x], scratch=full)
        mean = ag.op(rows, FP32, [square])
        del square
        scale = ag.op(rows, FP32, [mean])
        keeps = []
        if x.node is not None:
            keeps = [x, scale]
        return ag.op(x.numel, FP32, [x, scale], keeps=keeps, scratch=full)

    # ---- Projections ----
    def project(self, projection: Projection, x: Tensor) -> Tensor:
        """Return the output of a linear layer, quantized or not, with its adapters."""
        ag = self.autograd
        if projection.quantized is not None:
            out = self.quantized_product(projection, x)
        elif projection.by_inputs:
            out = self.summed(self.linear(projection.weight, x))
        else:
            out = self.linear(projection.weight, self.given_whole(x))
        if not projection.adapters:
            return out
        itemsize = out.itemsize
        out = ag.add(out, self.adapted(projection, x, itemsize))
        return ag.cast(out, itemsize)

    def quantized_product(self, projection: Projection, x: Tensor) -> Tensor:
        """Return the product of bitsandbytes' layers.

        Their backward pass dequantizes the whole weight. The int8 layer computes in the precision
        of its input, which it refers to by itself (ctx.tensors of MatMul8bitLt), and copies it to
        fp16 and to int8, 3 bytes per element. The 4-bit
        layer casts its input to the precision of autocast, and the result back.
        """
        ag = self.autograd
        if projection.quantized == "int8":
            ag.touch(x.numel, 3)
            out = self.dequantized_product(projection, x)
            ag.hold(out, x)
            return out
        cast = ag.cast(x, ag.autocast_itemsize)
        out = ag.cast(self.dequantized_product(projection, cast), x.itemsize)
        del cast
        if projection.adapters:
            out = ag.op(out.numel, out.itemsize, [out])  # peft clones it
        return out

    def dequantized_product(self, projection: Projection, x: Tensor) -> Tensor:
        """Return the product of a quantized weight with x in the precision of x."""
        features_in = x.numel // self.tokens
        numel = projection.elements // features_in * self.tokens
        scratch = projection.elements * x.itemsize
        return self.autograd.op(numel, x.itemsize, [x], scratch=scratch)

    def adapted(self, projection: Projection, x: Tensor, itemsize: int) -> Tensor:
        """Return what LoRA adds to a linear layer: scale * B(A(dropout(x)))."""
        ag = self.autograd
        z = self.low_rank_product(projection, x)
        z = ag.op(z.numel, z.itemsize, [z])  # times the scale
        if projection.quantized is not None and ag.autocast_itemsize is None:
            return ag.cast(z, itemsize)
        return z

    def low_rank_product(self, projection: Projection, x: Tensor) -> Tensor:
        """Return B(A(dropout(x))).

        Under tensor parallelism a rank has the columns of A for its part of the inputs, or the rows
        of B for its part of the outputs.
        """
        ag = self.autograd
        a, b = projection.adapters
        if ag.autocast_itemsize is None:
            x = ag.cast(x, a.itemsize)  # peft casts, but under autocast the recipe prevents it
        if self.args.lora_dropout:
            x = self.dropped(projection, x)
        z = self.linear(a, x)
        if projection.by_inputs:
            return self.linear(b, self.summed(z))
        return self.linear(b, self.given_whole(z))

    def dropped(self, projection: Projection, x: Tensor) -> Tensor:
        """Return dropout(x). Its mask takes one byte per element.

        For a part of the inputs the mask is that of all of them, in the precision of x
        (DropoutOfPart of the recipes).
        """
        mask = Tensor(x.numel, 1, None)
        if self.plan.tp > 1 and projection.by_inputs:
            mask = Tensor(x.numel * self.plan.tp, x.itemsize, None)
        mask.storage = self.autograd.new(mask.numel, mask.itemsize)
        return self.autograd.op(x.numel, x.itemsize, [x], keeps=[mask])

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        """Return the output of a linear layer that is not quantized."""
        return self.module(weight, partial(self.product, weight), x)

    def product(self, weight: Weight, x: Tensor) -> Tensor:
        """Return the product of a weight with x."""
        return self.autograd.linear(x, weight, self.tokens)
