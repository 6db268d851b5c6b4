# SPDX-License-Identifier: Apache-2.0
"""What a rank has of each weight under tensor or expert parallelism, by transformers' plans.

A rank has 1/tp of the rows or of the columns of a matrix that the plan splits, and the others, such
as norms, whole. What the model computes between a matrix split by its rows and one split by its
columns is split too: queries, keys, values and what is inside the MLP. The hidden states between
layers, and the logits, are whole on every rank. Under expert parallelism a rank has 1/ep of the
experts of each layer, whole.
"""

from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import _get_parameter_plan

from rehearsal.step_hooks import OF_EXPERTS, SPLIT_DIMENSION

from .decoder import Layer
from .errors import UnplannableError

OUTPUTS = -2  # the dimension of a matrix with a row for each output


def shapes_of(model: PreTrainedModel, tp: int, ep: int = 1) -> dict[int, tuple[int, ...]]:
    """Return {id of a parameter: shape of this rank's part} of what ranks split.

    tp: ranks that share matrices. ep: ranks that share experts.
    """
    if ep > 1:
        return dict(shapes_of_experts(model, ep))
    if tp > 1:
        return dict(split_shapes(model, tp))
    return {}


def shapes_of_experts(model: PreTrainedModel, ep: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (id of a parameter, shape of this rank's part) of each that is of experts."""
    for name, parameter in model.named_parameters():
        if _get_parameter_plan(name, model.ep_plan) == OF_EXPERTS:
            experts, *others = parameter.shape
            yield id(parameter), (experts // ep, *others)


def split_shapes(model: PreTrainedModel, tp: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (id of a parameter, shape of this rank's part) of each that is split."""
    for name, parameter in model.named_parameters():
        style = _get_parameter_plan(name, model.tp_plan)
        dimension = SPLIT_DIMENSION.get(style or "")
        # The bias of a matrix is split if its rows are, which are its outputs.
        if parameter.dim() == 1 and dimension is not None:
            dimension = 0 if dimension == OUTPUTS else None
        if dimension is not None:
            shape = list(parameter.shape)
            shape[dimension] //= tp
            yield id(parameter), tuple(shape)


def refuse_partly_split(layers: list[Layer], tp: int) -> None:
    """Raise UnplannableError if the plan of a model leaves projections of its layers whole."""
    for layer in layers:
        if layer.experts is not None:
            raise UnplannableError(
                "tensor parallelism of a mixture of experts cannot be planned; rehearse the run"
            )
        for name, projection in layer.projections.items():
            if projection.weight.numel * tp != projection.elements:
                raise UnplannableError(
                    f"tensor parallelism leaves the {name} projections of this model whole, which "
                    "cannot be planned; rehearse the run instead"
                )
