# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline over sizes, driven by the schedules of torch.distributed.pipelining.

A schedule of torch asks its stages for forward passes, backward passes, sends and receives. Here it
asks `SizedStage`, which has the methods of torch's stage and a ledger instead of tensors. So which
micro-batches are in flight, and which sends a rank still waits for, follows from torch's own code.

A stage of torch (stage.py) holds besides its weights

    a buffer for each micro-batch whose hidden states it receives, and another for each gradient;
    they stay from batch to batch
    the output and the graph of each micro-batch in flight, from its forward to its backward pass
    with a backward pass in two parts, from the first to the second: what the ops have kept, and
    the gradient of the result of each op that has a weight; the gradients of what was received
    until the next batch

The part for the inputs and the part for the weights are those of _backward.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from .autograd import Autograd, BackwardRun, Flow, Node, Tensor, Weight
from .ledger import Storage
from .ranks import Replica

ONE_NUMBER = 1  # bytes of the gradient of a loss, which is next to nothing
ForwardOfStage = Callable[[Tensor | None], tuple[Tensor, tuple[Storage | None, ...]]]


class Sharding(Protocol):
    """What a strategy does at the actions of a schedule that are about shards."""

    def unshard(self, stage: int) -> None: ...
    def wait_for_unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def reduce_stage(self, stage: int) -> None: ...
    def add_up_root(self, stage: int) -> None: ...


class Sent(NamedTuple):
    """A message on its way, which holds what it sends until it is dropped, as torch's Work does."""

    storage: Storage

    def wait(self) -> None:
        """Do nothing: messages take no time here."""


def start_messages(messages: Sequence[Sent], desc: str | None = None) -> list[Sent]:
    """Return messages as they are, in place of torch's function that sends them."""
    return list(messages)


def start_by_peer(messages: Sequence[Sent], desc: str | None = None) -> dict[int, list[Sent]]:
    """Do the same in place of torch's function that sorts messages by their receiver."""
    return {0: list(messages)} if messages else {}


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Have torch's schedules send nothing."""
    module: Any = schedules
    sending = module._batch_p2p, module._sorted_batch_p2p
    module._batch_p2p = start_messages
    module._sorted_batch_p2p = start_by_peer
    try:
        yield
    finally:
        module._batch_p2p, module._sorted_batch_p2p = sending


class ShardedModule(FSDPModule):
    """What a schedule takes for the module of a stage that FSDP2 shards."""

    def __new__(cls, *args: Any) -> "ShardedModule":
        return object.__new__(cls)

    def __init__(self, strategy: Sharding, stage: int) -> None:
        self.strategy = strategy
        self.stage = stage

    def modules(self) -> Iterator["ShardedModule"]:
        """Yield the module that stands for all of the stage."""
        yield self

    def unshard(self, async_op: bool = False) -> Any:
        """Start to gather the weights of the stage; return what waits for it."""
        self.strategy.unshard(self.stage)
        return self

    def wait(self) -> None:
        """Wait until the weights are gathered."""
        self.strategy.wait_for_unshard(self.stage)

    def reshard(self) -> None:
        """Free the gathered weights."""
        self.strategy.reshard(self.stage)


class InFlight(NamedTuple):
    """What a stage holds of a micro-batch between its passes.

    storage: that of the output.
    received: the leaf of the graph for what was received; None in the first stage.
    uses: how often the graph uses each weight.
    """

    output: Tensor
    storage: Storage | None
    received: Weight | None
    held: tuple[Storage | None, ...]
    uses: list[tuple[Weight, int]]


class Place(NamedTuple):
    """Where a stage is: its number among all stages, and its rank among those of the pipeline."""

    stage: int
    num_stages: int
    rank: int
    num_ranks: int


class SizedStage:
    """A stage of a rank, with the methods that torch's schedules call.

    Args:
        place: of the stage.
        autograd: in whose ledger everything is counted.
        strategy: what holds the weights of the rank.
        forward: returns the output for what was received, and what else the graph holds.
        message: elements and bytes per element of a micro-batch's hidden states.
    """

    device = "cpu"
    output_chunks: Sequence[Any] = ()

    def __init__(
        self,
        place: Place,
        autograd: Autograd,
        strategy: Replica,
        forward: ForwardOfStage,
        message: tuple[int, int],
    ) -> None:
        self.stage_index = place.stage
        self.num_stages = place.num_stages
        self.group_rank = place.rank
        self.group_size = place.num_ranks
        self.is_first = place.stage == 0
        self.is_last = place.stage == place.num_stages - 1
        self.autograd = autograd
        self.strategy = strategy
        self.forward = forward
        self.message = message
        self.submod: Any = None
        if strategy.plan.is_fsdp:
            self.submod = ShardedModule(strategy, place.stage)  # type: ignore[arg-type]
        self.has_backward = False
        self.stage_index_to_group_rank: dict[int, int] = {}
        # torch checks that messages go to neighbors only
        self.args_recv_info: dict[int, tuple] = {0: ()}
        self.act_send_info: dict[int, list] = {}
        self.inputs: dict[int, Storage] = {}  # {micro-batch: buffer}
        self.gradients: dict[int, Storage] = {}
        self.flying: dict[int, InFlight] = {}
        self.input_gradients: dict[int, Storage] = {}
        self.split: dict[int, tuple[InFlight, InputPass | None]] = {}
        self.of_inputs: list[Storage] = []  # what torch keeps in .grad until the next batch

    # ---- Set-up ----
    def _get_init_p2p_neighbors_ops(self) -> list[Sent]:
        return []

    def _prepare_forward_infra(self, number: int, *_: Any, **__: Any) -> None:
        """Allocate the buffers of a batch that are received in forward passes."""
        if not self.is_first:
            self.inputs = self.buffers(number)

    def _prepare_backward_infra(self, number: int, **_: Any) -> None:
        """Allocate the buffers of a batch that are received in backward passes."""
        if not self.is_last:
            self.gradients = self.buffers(number)

    def buffers(self, number: int) -> dict[int, Storage]:
        """Return a buffer for each of `number` micro-batches."""
        return {index: self.autograd.new(*self.message, "communication") for index in range(number)}

    def clear_runtime_states(self) -> None:
        """Drop what is left of the batch before."""
        self.flying.clear()
        self.of_inputs.clear()

    # ---- Messages ----
    def get_fwd_recv_ops(self, _: int) -> list[Sent]:
        return []  # buffers are there

    def get_bwd_recv_ops(self, _: int) -> list[Sent]:
        return []

    def get_fwd_send_ops(self, number: int) -> list[Sent]:
        """Return the message with the output of a micro-batch."""
        storage = self.flying[number].storage
        if self.is_last or storage is None:
            return []
        return [Sent(storage)]

    def get_bwd_send_ops(self, number: int) -> list[Sent]:
        """Return the message with the gradient of what was received."""
        if self.is_first or not self.has_backward:
            return []
        return [Sent(self.input_gradients.pop(number))]

    def set_local_fwd_input(self, output: Tensor, number: int) -> None:
        """Take the output of a stage of the same rank in the place of a buffer."""
        assert output.storage is not None
        self.inputs[number] = output.storage

    def get_local_bwd_output(self, number: int) -> Storage:
        """Return the gradient of what was received, for a stage of the same rank."""
        return self.input_gradients.pop(number)

    def set_local_bwd_input(self, gradient: Storage, number: int) -> None:
        """Take a gradient of a stage of the same rank in the place of a buffer."""
        self.gradients[number] = gradient

    # ---- Passes ----
    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> Tensor:
        """Run the forward pass of a micro-batch; return its output."""
        received = None
        leaf = None
        if not self.is_first:
            numel, itemsize = self.message
            leaf = Weight(numel, itemsize, trains=self.has_backward)
            leaf.is_received = True
            received = Tensor(numel, itemsize, self.inputs[number], leaf.node)
        self.autograd.no_grad = not self.has_backward
        output, held = self.forward(received)
        del received
        uses = self.taken_uses(leaf)
        self.flying[number] = InFlight(output, output.storage, leaf, held, uses)
        return Tensor(output.numel, output.itemsize, output.storage)

    def taken_uses(self, leaf: Weight | None) -> list[tuple[Weight, int]]:
        """Return how often the last graph uses each weight, and let the next one count from 0."""
        weights = [*self.strategy.trained]
        if leaf is not None:
            weights.append(leaf)
        uses = [(weight, weight.uses) for weight in weights if weight.uses]
        for weight, _ in uses:
            weight.uses = 0
        return uses

    def backward_one_chunk(
        self, number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, or its part for what was received."""
        if not self.has_backward:  # torch's schedules of one stage per rank ask in evaluation too
            return
        flight = self.flying.pop(number)
        if full_backward:
            self.run(flight, number, BackwardRun(self.autograd))
            return
        if self.is_first:  # torch leaves all to the second part
            self.split[number] = (flight, None)
            return
        first_part = InputPass(self.autograd)
        self.run(flight, number, first_part)
        self.of_inputs.append(self.input_gradients[number])
        self.split[number] = (flight._replace(storage=None), first_part)

    def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
        """Run the second part of a backward pass: the gradients of weights."""
        flight, first_part = self.split.pop(number)
        if first_part is None:
            self.run(flight, number, BackwardRun(self.autograd))
        else:
            first_part.finish()

    def run(self, flight: InFlight, number: int, run: BackwardRun) -> None:
        """Run a backward pass, whose gradient comes from the next stage, or from the loss."""
        for weight, uses in flight.uses:
            weight.uses = uses
        accumulate = self.autograd.accumulate

        def take(weight: Weight, gradient: Storage) -> None:
            if weight is flight.received:
                self.input_gradients[number] = gradient.becomes("communication")
            else:
                accumulate(weight, gradient)

        self.autograd.accumulate = take
        node = flight.output.node
        flight.output.node = None
        flight.output.storage = None
        assert node is not None
        if self.is_last:
            run.start(node, self.autograd.new(ONE_NUMBER, 1))
        else:
            run.start(node, self.gradients[number])
        while run.ready:
            run.run_next()
        if self.submod is not None:
            self.submod.strategy.add_up_root(self.stage_index)
        self.autograd.accumulate = accumulate

    def perform_reduce_grad(self, _: int) -> None:
        """Reduce the gradients of a batch, if FSDP2 shards the stage."""
        if self.submod is not None:
            self.submod.strategy.reduce_stage(self.stage_index)


class InputPass(BackwardRun):
    """The first part of a backward pass: gradients of the input, and what weights need for theirs.

    torch keeps the graph, and the gradient of the result of each op that has a weight. What comes
    after the last such op is freed.
    """

    def __init__(self, autograd: Autograd) -> None:
        super().__init__(autograd)
        self.left: list[tuple[Node, Storage, list[Flow]]] = []
        self.kept: list[Node] = []

    def differentiate(self, node: Node) -> None:
        """Compute the gradients of an op's inputs that are no weights."""
        gradient = self.waiting.pop(node)
        of_weights = [flow for flow in node.gives if weight_behind(flow.target) is not None]
        others = [flow for flow in node.gives if flow not in of_weights]
        if of_weights:
            self.left.append((node, gradient, of_weights))
        made = self.gradients_along(others, node, gradient)
        del gradient
        if self.left:
            self.kept.append(node)
        else:
            node.keeps = []
            node.holds = []
        node.before = None
        for target, part in made:
            self.arrive(target, part)

    def finish(self) -> None:
        """Compute the gradients of weights, the first layer first, and free the graph."""
        self.left.sort(key=lambda left: left[0].order, reverse=True)
        while self.left:
            node, gradient, flows = self.left.pop()
            for flow in flows:
                weight = weight_behind(flow.target)
                assert weight is not None
                part = gradient
                if flow.itemsize is not None:
                    part = self.autograd.new(flow.numel, flow.itemsize)
                if isinstance(flow.target, Node):  # autocast's copy
                    part = self.autograd.new(weight.numel, weight.itemsize)
                weight.uses = 0
                self.autograd.accumulate(weight, part)
            node.keeps = []
            node.holds = []
        self.kept.clear()


def weight_behind(target: Node | Weight) -> Weight | None:
    """Return the weight that an input of an op is, or is a copy of; None for other inputs.

    A leaf that stands for what a stage receives is no weight.
    """
    if isinstance(target, Weight):
        return None if target.is_received else target
    if len(target.gives) == 1 and not target.keeps and isinstance(target.gives[0].target, Weight):
        return weight_behind(target.gives[0].target)
    return None


def schedule_of(class_name: str, stages: Sequence[SizedStage], number: int) -> Any:
    """Return a schedule of torch for the stages of a rank.

    Args:
        class_name: of the schedule, in torch.distributed.pipelining.
        number: of micro-batches.
    """
    kind = getattr(pipelining, class_name)
    given: Any = list(stages)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        (given,) = stages
    return kind(given, number, loss_fn=lambda output, _: output, scale_grads=False)


def run_batch(schedule: Any, number: int, is_training: bool) -> None:
    """Have a schedule run a batch of `number` micro-batches."""
    with without_communication():
        run = schedule.step if is_training else schedule.eval
        run(target=torch.arange(number), losses=[], return_outputs=False)
