"""The forward pass of a decoder, written down op by op over sizes (memory_ledger.py), as transformers' models compute
it.

Known are decoders of Llama's kind: norm, attention with q, k and v of their own (grouped or not, with norms on them
or not), rotary positions, an MLP with or without gate, residuals, a head. `read` finds what a model has by the names
of its modules and raises Unplannable for a layer with others (experts, state-space layers): those have to be traced.
"""

from dataclasses import dataclass, field

import torch

from llama import logits_mib
from memory_ledger import Autograd, Tensor, Weight
from model_shapes import Quantized, Unplannable

FP32 = 4
PROJECTIONS = {  # the names that models give them: what they are here
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "out_proj": "o",
    "dense": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "fc1": "up",
    "fc2": "down",
}
NORMS = {
    "input_layernorm": "before attention",
    "post_attention_layernorm": "before mlp",
    "q_norm": "q",
    "k_norm": "k",
    "q_layernorm": "q",
    "k_layernorm": "k",
    "pre_feedforward_layernorm": "before mlp",
    "post_feedforward_layernorm": "after mlp",
}
CHANGES_LOGITS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)  # Gemma 2, Cohere, Granite
WHAT_ELSE = "its memory has to be traced: add --simulate"


@dataclass
class Projection:
    """A linear layer: its weight, and, if there are any, bias, LoRA's A and B, or the bytes of the weight
    dequantized."""

    weight: Weight
    adapters: tuple = ()
    quantized: str = ""  # "4-bit", "int8" or no
    elements: int = 0  # of the weight dequantized

    def rows_out(self, features_in):
        return (self.elements or self.weight.numel) // features_in


@dataclass(eq=False)
class Layer:
    projections: dict = field(default_factory=dict)
    norms: dict = field(default_factory=dict)  # (kind, Weight)
    window: int = 0  # tokens that attention sees at most; 0: all


@dataclass
class Decoder:
    """What the forward pass needs of a model. heads, kv_heads: of attention; features of a head: head_dim."""

    embedding: Weight
    layers: list
    norm: tuple
    head: Projection
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


def kind_of_norm(module):
    if isinstance(module, torch.nn.LayerNorm):
        return "layer"
    return "gemma" if "Gemma" in type(module).__name__ else "rms"


def read(model, config, make):
    """Return the Decoder of a model on the meta device. make(parameter, name): its Weight, one and the same for tied
    ones."""
    text, inner = config.get_text_config(), model.base_model
    layers = next(
        (module for module in inner.children() if isinstance(module, torch.nn.ModuleList)), None
    )
    name = type(model).__name__
    changed = [key for key in CHANGES_LOGITS if getattr(text, key, None) not in (None, 1, 1.0)]
    if changed:
        raise Unplannable(f"{name}: the closed form does not know {changed[0]}; {WHAT_ELSE}")
    if layers is None or "norm" not in dict(inner.named_children()):
        raise Unplannable(f"{name}: not a decoder of Llama's kind; {WHAT_ELSE}")
    found = []
    for layer in layers:
        layer_found = Layer()
        for path, module in layer.named_modules():
            leaf = path.rpartition(".")[2]
            own = dict(module.named_parameters(recurse=False))
            if isinstance(module, torch.nn.Linear) and leaf in PROJECTIONS:
                layer_found.projections[PROJECTIONS[leaf]] = projection(module, make)
            elif own and leaf in NORMS:
                layer_found.norms[NORMS[leaf]] = kind_of_norm(module), make(own["weight"])
            elif own:
                raise Unplannable(
                    f"{name}: the closed form does not know its {path} ({type(module).__name__}); {WHAT_ELSE}"
                )
        if {"post_feedforward_layernorm", "post_attention_layernorm"} <= set(
            dict(layer.named_children())
        ):  # Gemma 2 and 3
            layer_found.norms["after attention"] = (
                kind_of_norm(layer.post_attention_layernorm),
                make(layer.post_attention_layernorm.weight),
            )
        if (
            not {"q", "k", "v", "o", "up", "down"} <= set(layer_found.projections)
            or "before attention" not in layer_found.norms
        ):
            raise Unplannable(
                f"{name}: the closed form does not know its layers ({type(layer).__name__}); {WHAT_ELSE}"
            )
        layer_found.window = window_of(text, len(found))
        found.append(layer_found)
    heads, head = text.num_attention_heads, model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    return Decoder(
        embedding=make(embedding),
        layers=found,
        norm=(kind_of_norm(inner.norm), make(inner.norm.weight)),
        head=projection(head, make),
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        tied=head.weight is embedding,
    )


def window_of(config, number):
    """Tokens that attention of a layer sees at most, 0 for all; transformers hides the others by a mask."""
    kinds = getattr(config, "layer_types", None)
    slides = (
        kinds[number] == "sliding_attention"
        if kinds
        else getattr(config, "use_sliding_window", True)
    )
    return (getattr(config, "sliding_window", None) or 0) if slides else 0


def projection(module, make):
    elements = module.in_features * module.out_features
    kind = ("4-bit" if module.in_4bit else "int8") if isinstance(module, Quantized) else ""
    return Projection(make(module.weight), (), kind, elements)


class Forward:
    """A forward pass over `lines` x `length` tokens, with the recipe's loss."""

    def __init__(self, autograd, decoder, lines, length, args, packed):
        self.ag, self.decoder, self.lines, self.length, self.args = (
            autograd,
            decoder,
            lines,
            length,
            args,
        )
        self.tokens, self.eager = lines * length, args.attn_implementation == "eager"
        self.flash = "flash" in args.attn_implementation or args.attn_implementation in (
            "flex_attention",
            "varlen",
        )
        self.masked = packed and not self.flash

    def norm(self, kind_and_weight, x, tokens):
        """RMSNorm as Llama has it: fp32 inside, the weight in the dtype of the input; Gemma's weight in fp32 too; or
        LayerNorm's kernel."""
        ag, (kind, weight) = self.ag, kind_and_weight
        if kind == "layer":
            moments = Tensor(2 * tokens, FP32, ag.new(2 * tokens, FP32))
            return ag.op(x.numel, x.width, [x, weight], keeps=[x, moments])
        width, full = x.width, x.numel * FP32
        f = ag.cast(x, FP32)
        variance = ag.op(tokens, FP32, [ag.op(x.numel, FP32, [f], keeps=[f], scratch=full)])
        scale = ag.op(tokens, FP32, [variance])
        n = ag.op(x.numel, FP32, [f, scale], keeps=[f, scale] if f.node else [], scratch=full)
        del f, variance, scale
        if kind == "rms":
            n = ag.cast(n, width)
        out = ag.op(
            x.numel,
            max(n.width, weight.width),
            [n, weight],
            keeps=[n] * weight.trains,
            scratch=n.numel * n.width * weight.trains,
        )
        return ag.cast(out, width) if kind == "gemma" else out

    def project(self, p, x):
        """A linear layer with what quantization and adapters add (bitsandbytes' and peft's layers)."""
        ag, tokens = self.ag, self.tokens
        numel = p.elements * tokens // x.numel * tokens
        if not p.quantized:
            out = ag.linear(x, p.weight, tokens)
        else:
            low = ag.autocasts or x.width
            z = ag.cast(x, low)
            if p.quantized == "int8":
                ag.new(x.numel, 3)  # the input in fp16 and in int8
            out = ag.op(
                numel,
                low,
                [z],
                keeps=[z] if p.quantized == "int8" else [],
                scratch=p.elements * low,
            )
            if p.adapters and p.quantized == "4-bit":
                out = ag.op(numel, low, [out])  # peft clones it
        if p.adapters:
            a, b = p.adapters
            z = x if ag.autocasts else ag.cast(x, a.width)  # the recipe leaves it to autocast
            if self.args.lora_dropout:
                z = ag.op(z.numel, z.width, [z], keeps=[Tensor(z.numel, 1, ag.new(z.numel, 1))])
            width = out.width
            z = ag.linear(ag.linear(z, a, tokens), b, tokens)
            z = ag.op(numel, z.width, [z])  # times the scale
            if p.quantized:
                z = ag.cast(z, width)
            out = ag.add(out, z)
            del z
            out = ag.cast(out, width)
        return out

    def rotate(self, x):
        ag, size = self.ag, x.numel * x.width
        straight, turned = (
            ag.op(x.numel, x.width, [x]),
            ag.op(x.numel, x.width, [x], scratch=2 * size),
        )
        turned = ag.op(x.numel, x.width, [turned])
        return ag.op(x.numel, x.width, [straight, turned], views=True)

    def is_masked(self, layer):
        """Whether the kernel is given a mask: lines that hold several rows, or more tokens than the layer sees."""
        return self.masked or not self.flash and 0 < layer.window <= self.length

    def attention(self, q, k, v, masked):
        ag, d = self.ag, self.decoder
        if (
            self.eager or masked
        ) and d.heads > d.kv_heads:  # repeat_kv; else the kernel shares them
            k, v = (ag.op(q.numel, x.width, [x], scratch=q.numel * x.width) for x in (k, v))
        if not self.eager:
            kept = [q, k, v, Tensor(0, 4, ag.new(self.tokens * d.heads, FP32))]
            if masked:  # each layer makes its own of the mask
                kept.append(Tensor(0, 1, ag.new(self.lines * self.length**2, q.width)))
            storage = ag.new(q.numel, q.width)
            return ag.op(
                q.numel,
                q.width,
                [q, k, v],
                keeps=kept + [Tensor(q.numel, q.width, storage)],
                storage=storage,
            )
        scores = d.heads * self.lines * self.length**2
        weights = ag.op(scores, q.width, [q, k], keeps=[q, k])
        weights = ag.op(scores, q.width, [weights])  # times the scale
        weights = ag.op(scores, q.width, [weights], views=True)  # plus the mask
        weights = ag.cast(weights, FP32)
        storage = ag.new(scores, FP32)
        weights = ag.op(
            scores, FP32, [weights], keeps=[Tensor(scores, FP32, storage)], storage=storage
        )
        del storage
        weights = ag.cast(weights, q.width)
        out = ag.op(q.numel, q.width, [weights, v], keeps=[weights, v])
        return ag.op(q.numel, q.width, [out])  # contiguous

    def layer(self, layer, x):
        ag, d, p, norms = self.ag, self.decoder, layer.projections, layer.norms
        h = self.norm(norms["before attention"], x, self.tokens)
        q, k, v = (self.project(p[name], h) for name in "qkv")
        if "q" in norms:
            q, k = (
                self.norm(norms["q"], q, self.tokens * d.heads),
                self.norm(norms["k"], k, self.tokens * d.kv_heads),
            )
        q, k = self.rotate(q), self.rotate(k)
        a = self.attention(q, k, v, self.is_masked(layer))
        del q, k, v
        a = self.project(p["o"], a)
        del h
        if "after attention" in norms:
            a = self.norm(norms["after attention"], a, self.tokens)
        x = ag.add(x, a)
        del a
        h = self.norm(norms.get("before mlp", norms["before attention"]), x, self.tokens)
        if "gate" in p:
            gate = self.project(p["gate"], h)
            act = ag.op(gate.numel, gate.width, [gate], keeps=[gate])
            del gate
            up = self.project(p["up"], h)
            m = ag.mul(act, up)
            del act, up
        else:
            up = self.project(p["up"], h)
            m = ag.op(up.numel, up.width, [up], keeps=[up])
            del up
        m = self.project(p["down"], m)
        if "after mlp" in norms:
            m = self.norm(norms["after mlp"], m, self.tokens)
        return ag.add(x, m)

    def embed(self):
        d = self.decoder
        return self.ag.op(self.tokens * d.hidden, d.embedding.width, [d.embedding])

    def rotary(self):
        """Cosine and sine of the positions, which each layer keeps."""
        return self.ag.new(2 * self.length * self.decoder.head_dim, self.decoder.embedding.width)

    def mask(self):
        """The mask that eager attention adds, or, where lines hold several rows, who sees whom."""
        if not self.eager and not any(map(self.is_masked, self.decoder.layers)):
            return None
        return self.ag.new(
            self.lines * self.length**2, self.decoder.embedding.width if self.eager else 1
        )

    def loss(self, x, learnt):
        """The recipe's loss_in_head: hidden states of learnt tokens alone, and their logits, in pieces if need be."""
        ag, d = self.ag, self.decoder
        vocab = d.head.elements // d.hidden
        piece = max(int(logits_mib(self.args, torch.device("cpu")) * 2**20 / (4 * vocab)), 1)
        hidden = ag.op(learnt * d.hidden, x.width, [x])
        if learnt <= piece:
            return self.loss_of(hidden, learnt)
        return self.loss_in_pieces(hidden, learnt, piece)

    def loss_in_pieces(self, hidden, learnt, piece):
        """The recipe's LossInPieces: one node, which keeps the hidden states and computes each piece in both passes.
        In the backward pass it holds the head's gradient in fp32 beside that of a piece."""
        ag, head = self.ag, self.decoder.head.weight
        width = ag.autocasts or hidden.width
        self.pieces(width, piece, Tensor(hidden.numel, width, None))
        weight = Tensor(head.numel, head.width, None, head.node)
        scratch = (
            head.numel * FP32 if head.trains and head.width != FP32 else 0
        )  # until it is rounded
        losses = ag.op(learnt, FP32, [hidden, weight], keeps=[hidden], scratch=scratch)
        if losses.node:
            losses.node.before = lambda: self.pieces(width, piece, hidden)
        return ag.op(1, FP32, [losses])

    def pieces(self, width, piece, hidden):
        """Hold for a moment what a piece takes: in the forward pass, and, if the hidden states have a node or the head
        trains, in the backward pass."""
        ledger, head = self.ag.ledger, self.decoder.head.weight
        copy = self.ag.new(head.numel, width, "working copies") if width != head.width else None
        inner = Autograd(ledger, accumulate=lambda weight, gradient: None)
        is_backward = hidden.storage is not None
        held = []
        if is_backward and hidden.node:
            held.append(self.ag.new(hidden.numel, hidden.width))
        if is_backward and head.trains:
            held.append(self.ag.new(head.numel, FP32, "gradients"))
        x = Weight(piece * self.decoder.hidden, width, is_backward and bool(hidden.node))
        weight = Weight(head.numel, width, is_backward and head.trains)
        rows = inner.new(x.numel, width) if width != hidden.width else None
        part = Tensor(x.numel, width, rows, x.node)
        loss = self.loss_of(part, piece, inner, Tensor(weight.numel, width, copy, weight.node))
        del rows, part
        if loss.node:
            inner.backward(loss, inner.new(1, FP32))

    def loss_of(self, hidden, rows, ag=None, weight=None):
        ag, vocab = ag or self.ag, self.decoder.head.elements // self.decoder.hidden
        x, copy = ag.cast(hidden, ag.autocasts), weight or ag.copy_of(self.decoder.head.weight)
        logits = ag.op(
            rows * vocab, x.width, [x, copy], keeps=ag.kept_by_product(x, copy), category="logits"
        )
        del x, copy
        logits = (
            logits
            if logits.width == FP32
            else ag.op(logits.numel, FP32, [logits], category="logits")
        )
        storage = ag.new(rows * vocab, FP32, "logits")
        probabilities = ag.op(
            rows * vocab, FP32, [logits], keeps=[Tensor(0, FP32, storage)], storage=storage
        )
        del storage
        return ag.op(1, FP32, [probabilities])

    def run(self, learnt, around):
        """Return the loss of a batch, and what is held until the backward pass is done: layers that compute
        themselves again need the mask again. around(layer, or "embedding" or "tail", f, x): f(x), with what the
        strategy does around it."""
        held, mask = self.rotary(), self.mask()
        x = around("embedding", lambda _: self.embed(), None)
        for layer in self.decoder.layers:
            x = around(layer, lambda x, layer=layer: self.layer(layer, x), x)
        loss = around(
            "tail", lambda x: self.loss(self.norm(self.decoder.norm, x, self.tokens), learnt), x
        )
        self.ag.end_autocast()
        return loss, (held, mask if self.args.gradient_checkpointing else None)
