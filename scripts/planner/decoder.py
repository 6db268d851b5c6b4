# SPDX-License-Identifier: Apache-2.0
"""Which weights a decoder has, and what each is for.

The closed form covers decoders like Llama: norm, attention with separate q, k and v (grouped or
not, with norms on them or not), rotary positions, an MLP with or without a gate, residuals, a head.
In place of the MLP a layer may have experts, of which a router picks some for each token.
`read_decoder` recognizes the parts of a model by the names of its modules, and raises
UnplannableError for a layer with other parts (shared experts, state-space layers): such a model
must be traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .autograd import Weight
from .errors import UnplannableError
from .shapes import Quantized, layers_of

MakeWeight = Callable[[torch.Tensor], Weight]
NormKind = Literal["rms", "gemma", "layer"]

PROJECTIONS = {  # {name in models: name here}
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
# Those of which a rank has some inputs under tensor parallelism; of the others it has some outputs
BY_INPUTS = {"o", "down"}
NEEDED_PROJECTIONS = {"q", "k", "v", "o"}
OF_MLP = {"gate", "up", "down"}
NEEDED_OF_MLP = {"up", "down"}
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
# Gemma 2 and 3 have norms before and after both halves of a layer. They have modules of both names.
SANDWICH = {"post_attention_layernorm", "post_feedforward_layernorm"}
NORMS_OF_SANDWICH = NORMS | {"post_attention_layernorm": "after attention"}
# Keys of configs whose models change their logits or the scores of attention: Gemma 2, Cohere,
# Granite
CHANGES_LOGITS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)
WHAT_ELSE = "its memory must be traced: add --simulate"


@dataclass
class Projection:
    """A linear layer."""

    weight: Weight
    elements: int  # elements of the matrix; a 4-bit weight is stored in fewer
    by_inputs: bool = False  # under tensor parallelism: what a rank has of it
    quantized: Literal["4-bit", "int8"] | None = None
    adapters: tuple[Weight, ...] = ()  # LoRA's A, [in, r], and B, [r, out], or none


@dataclass
class Norm:
    """RMSNorm as Llama or as Gemma has it, or a LayerNorm."""

    kind: NormKind
    weight: Weight


@dataclass(eq=False)
class Experts:
    """The experts of a layer, each a gated MLP, and the router that picks some for each token.

    Attributes:
        router: its weight, which every rank has whole.
        gate_up, down: the weights of the experts that this rank has.
        per_token: experts that the router picks for a token.
        width: features inside an expert.
    """

    router: Weight
    gate_up: Weight
    down: Weight
    per_token: int
    width: int

    @property
    def weights(self) -> list[Weight]:
        """The weights of the experts that this rank has."""
        return [self.gate_up, self.down]


@dataclass(eq=False)
class Layer:
    """A decoder layer: its projections and norms by what they are for."""

    projections: dict[str, Projection] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    window: int = 0  # tokens that attention sees at most; 0: all
    experts: Experts | None = None


@dataclass
class Decoder:
    """What the forward pass needs to know of a model."""

    embedding: Weight
    layers: list[Layer]
    norm: Norm
    head: Projection
    hidden: int  # features of a token
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # whether the head's weight is the embedding
    is_eager: bool  # whether attention writes its scores to memory

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.head.elements // self.hidden


def read_decoder(
    model: PreTrainedModel, config: PretrainedConfig, make_weight: MakeWeight
) -> Decoder:
    """Return the Decoder of a model on the meta device.

    make_weight: returns the Weight of a parameter, one and the same for tied ones.
    """
    text = config.get_text_config()
    refuse_unknown(model, text)
    layers = []
    for number, module in enumerate(layers_of(model)):
        layer = read_layer(module, make_weight, type(model).__name__)
        layer.window = window_of(text, number)
        layers.append(layer)
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise no_known_decoder(model)
    embedding = model.get_input_embeddings().get_parameter("weight")
    embedding_weight = make_weight(embedding)
    embedding_weight.is_embedding = True
    heads = text.num_attention_heads
    return Decoder(
        embedding=embedding_weight,
        layers=layers,
        norm=read_norm(model.base_model.get_submodule("norm"), make_weight),
        head=read_projection(head, make_weight),
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        tied=head.weight is embedding,
        is_eager=model.config._attn_implementation == "eager",
    )


def refuse_unknown(model: PreTrainedModel, text: PretrainedConfig) -> None:
    """Raise UnplannableError for a model that is not a decoder like Llama."""
    name = type(model).__name__
    for key in CHANGES_LOGITS:
        if getattr(text, key, None) not in (None, 1, 1.0):
            raise UnplannableError(f"{name}: the closed form does not cover {key}; {WHAT_ELSE}")
    if len(layers_of(model)) == 0 or "norm" not in dict(model.base_model.named_children()):
        raise no_known_decoder(model)


def no_known_decoder(model: PreTrainedModel) -> UnplannableError:
    """Return the refusal of a model whose parts are not those of a decoder like Llama."""
    return UnplannableError(f"{type(model).__name__}: not a decoder like Llama; {WHAT_ELSE}")


def read_layer(module: torch.nn.Module, make_weight: MakeWeight, name_of_model: str) -> Layer:
    """Return the Layer of a module. Raises UnplannableError for one with unknown parts."""
    layer = Layer()
    names_of_norms = NORMS
    if SANDWICH.issubset(dict(module.named_children())):
        names_of_norms = NORMS_OF_SANDWICH
    for path, part in module.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(part, torch.nn.Linear) and leaf in PROJECTIONS:
            name = PROJECTIONS[leaf]
            layer.projections[name] = read_projection(part, make_weight, name in BY_INPUTS)
        elif is_of_experts(part):
            layer.experts = read_experts(module, path, make_weight, name_of_model)
        elif dict(part.named_parameters(recurse=False)):
            if isinstance(getattr(part, "top_k", None), int):  # the router
                continue
            if leaf not in names_of_norms:
                raise UnplannableError(
                    f"{name_of_model}: the closed form does not cover its {path} "
                    f"({type(part).__name__}); {WHAT_ELSE}"
                )
            layer.norms[names_of_norms[leaf]] = read_norm(part, make_weight)
    has_projections = NEEDED_PROJECTIONS.issubset(layer.projections)
    if layer.experts is None:
        has_mlp = NEEDED_OF_MLP.issubset(layer.projections)
    else:
        has_mlp = not OF_MLP.intersection(layer.projections)
    if not (has_projections and has_mlp) or "before attention" not in layer.norms:
        raise UnplannableError(
            f"{name_of_model}: the closed form does not cover its layers "
            f"({type(module).__name__}); {WHAT_ELSE}"
        )
    return layer


def is_of_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has the weights of all experts of a layer."""
    return set(dict(module.named_parameters(recurse=False))) == {"gate_up_proj", "down_proj"}


def read_experts(
    layer: torch.nn.Module, path: str, make_weight: MakeWeight, name_of_model: str
) -> Experts:
    """Return the Experts of the module at a path in a layer; the router is beside it.

    Raises UnplannableError if there is no router like Mixtral's.
    """
    module = layer.get_submodule(path)
    router: Any = getattr(layer.get_submodule(path.rpartition(".")[0]), "gate", None)
    if not isinstance(getattr(router, "top_k", None), int):
        raise UnplannableError(
            f"{name_of_model}: the closed form does not cover its routers; {WHAT_ELSE}"
        )
    gate_up = module.get_parameter("gate_up_proj")
    down = module.get_parameter("down_proj")
    return Experts(
        router=make_weight(router.get_parameter("weight")),
        gate_up=make_weight(gate_up),
        down=make_weight(down),
        per_token=router.top_k,
        width=down.shape[-1],
    )


def read_projection(
    module: torch.nn.Linear, make_weight: MakeWeight, by_inputs: bool = False
) -> Projection:
    """Return the Projection of a linear layer."""
    quantized = None
    if isinstance(module, Quantized):
        quantized = "4-bit" if module.in_4bit else "int8"
    elements = module.in_features * module.out_features
    return Projection(make_weight(module.weight), elements, by_inputs, quantized)


def read_norm(module: torch.nn.Module, make_weight: MakeWeight) -> Norm:
    """Return the Norm of a module."""
    return Norm(kind_of_norm(module), make_weight(module.get_parameter("weight")))


def kind_of_norm(module: torch.nn.Module) -> NormKind:
    """Return which formula a norm computes, judged by its class."""
    if isinstance(module, torch.nn.LayerNorm):
        return "layer"
    if "Gemma" in type(module).__name__:
        return "gemma"
    return "rms"


def window_of(config: PretrainedConfig, number: int) -> int:
    """Return how many tokens the attention of a layer sees at most, 0 for all.

    transformers hides the others by a mask.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds:
        slides = kinds[number] == "sliding_attention"
    else:
        slides = getattr(config, "use_sliding_window", True)
    if not slides:
        return 0
    return getattr(config, "sliding_window", None) or 0
