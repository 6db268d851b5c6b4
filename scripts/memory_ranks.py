"""What a rank holds under each strategy: at rest, around each layer of a pass, and at the optimizer step.

One class for each engine: `Whole` (one process and DDP), `Fsdp1` and `Fsdp2`, which gather a layer's parameters, use
them and let them go; DeepSpeed's are in memory_zero.py. Sources: torch's FSDPParamGroup and foreach_all_gather,
torch's FlatParamHandle and FSDP's _runtime_utils.py, accelerate's fsdp_utils.py; README's table of bytes a parameter.
How far each is off: scripts/track_ranks.py.
"""

import math

LOW = {"bf16": 2, "fp16": 2}
BLOCK_8BIT, LEAST_8BIT = (
    256,
    4096,
)  # bitsandbytes: an fp32 scale for 256 numbers; smaller tensors keep fp32 state


def state_bytes(weight, elements, width, optim):
    """Optimizer state of `elements` of a weight, two numbers each: in its own precision, or in what --optim says."""
    in_8_bits = optim in ("adamw_8bit", "paged_adamw_8bit") and not weight.embeds
    if in_8_bits and weight.numel >= LEAST_8BIT:
        return 2 * (elements + 4 * math.ceil(elements / BLOCK_8BIT))
    return 2 * elements * (width if optim.startswith("adamw_torch") else 4)


class Whole:
    """Every rank has all parameters. DDP: all gradients as well, in the buckets that it reduces."""

    def __init__(self, plan, weights, extra):
        self.plan, self.weights, self.extra = plan, weights, extra
        self.trained = [weight for weight in weights if weight.trains]
        self.elements = sum(weight.numel for weight in self.trained)

    def parameters(self):
        """{category: bytes} of whole parameters and what belongs to them."""
        held = dict(self.extra)
        for weight in self.weights:
            held[weight.kind] = held.get(weight.kind, 0) + weight.numel * weight.width
        return held

    def at_rest(self):
        """({category: bytes}, {category: bytes on the host}) between steps."""
        plan, device, host = self.plan, self.parameters(), {}
        device["optimizer"] = sum(
            state_bytes(w, w.numel, w.stored, plan.args.optim) for w in self.trained
        )
        if plan.args.optim.startswith("paged"):
            host["optimizer"] = device.pop("optimizer")
        if plan.engine == "ddp":
            device["gradients"] = sum(weight.numel * weight.width for weight in self.trained)
        return device, host

    def begin(self, autograd):
        self.ag = autograd
        return self.accumulate

    def begin_pass(self, last):
        """Before a micro-batch; the last of a step is the one whose gradients are reduced."""
        self.last = last

    def end_forward(self):
        """Between forward and backward pass."""

    def around(self, layer, forward, x):
        """The output of a layer, or of "embedding" or "tail", with what the strategy does around it."""
        checkpoints = self.plan.args.gradient_checkpointing and not isinstance(layer, str)
        return self.ag.checkpoint(forward, x) if checkpoints else forward(x)

    def accumulate(self, weight, grad):
        if self.plan.engine == "ddp" and self.last:
            weight.grad = None  # copied into its bucket
        else:
            self.ag.keep_gradient(weight, grad)

    def end_pass(self):
        """After a micro-batch."""

    def step(self):
        """The optimizer: fused kernels make nothing, torch's loop over lists a tensor for each weight."""
        if self.plan.args.optim == "adamw_torch":
            _ = self.ag.new(
                sum(weight.numel * weight.stored for weight in self.trained), 1, "optimizer"
            )
        for weight in self.trained:
            weight.grad = None


class Unit:
    """Parameters that are gathered together: elements of all ranks with padding, of which a rank has 1/N."""

    def __init__(self, weights, plan):
        self.weights, n = weights, plan.shards
        rows = plan.engine == "fsdp2"  # which cuts by rows, the others flat
        self.shares = {
            w: math.ceil(w.rows / n) * (w.numel // w.rows) if rows else w.numel / n for w in weights
        }
        self.gathered = sum(share * n * w.width for w, share in self.shares.items())
        self.casts = sum(share * w.width for w, share in self.shares.items() if w.stored != w.width)
        self.trained = [(w, share) for w, share in self.shares.items() if w.trains]
        self.trained_whole = sum(share * n * w.width for w, share in self.trained)
        # Reductions are in fp32 under mixed precision (reduce_in_fp32 of the recipes)
        self.reduced_whole = sum(
            share * n * (4 if plan.low else w.width) for w, share in self.trained
        )
        self.whole = self.flat = self.reduced = None
        self.grads = {}


class Gathered(Whole):
    """1/N of everything at rest, and around a layer its parameters whole, in what they compute in. Gradients of a
    layer are whole until the layer is done; then they are reduced into 1/N."""

    def __init__(self, plan, weights, extra, units):
        super().__init__(plan, weights, extra)
        self.units = {name: Unit(members, plan) for name, members in units.items() if members}
        self.order = list(self.units)
        self.unit_of = {weight: unit for unit in self.units.values() for weight in unit.weights}
        self.own = sum(share for unit in self.units.values() for _, share in unit.trained)

    def at_rest(self):
        plan, device, host = self.plan, dict(self.extra), {}
        place = host if plan.offloads_parameters else device
        for unit in self.units.values():
            for weight, share in unit.shares.items():
                place[weight.kind] = place.get(weight.kind, 0) + math.ceil(share) * weight.stored
        states = host if plan.offloads_optimizer else device
        shares = [
            (w, math.ceil(share)) for unit in self.units.values() for w, share in unit.trained
        ]
        states["optimizer"] = sum(
            state_bytes(w, share, w.stored, plan.args.optim) for w, share in shares
        )
        if plan.offloads_optimizer:
            states["gradients"] = sum(share * w.stored for w, share in shares)
        return device, host

    def gather(self, unit, backward=False):
        """Make a unit whole, if it is not."""
        raise NotImplementedError

    def gather_ahead(self, unit):
        """What the backward pass does while a layer computes, for the unit that comes next."""

    def release(self, unit):
        unit.whole = None

    def keeps(self, layer):
        """Whether a unit stays whole between the passes."""
        return not self.plan.reshards or layer == "tail"

    def around(self, layer, forward, x):
        unit, at_start = self.units.get(layer), self.plan.gathers_tail_first
        if layer == "embedding" and at_start:
            self.gather(self.units["tail"])
        if unit is None:
            return super().around(layer, forward, x)
        self.gather(unit)
        if (
            x is not None and x.node and not (layer == "tail" and at_start)
        ):  # which is done when all is
            x = self.ag.op(x.numel, x.width, [x], views=True, storage=x.storage)
            x.node.before = lambda: self.reduce(unit)
        y = super().around(layer, forward, x)
        if y.node:
            again = y.node.before

            def before():
                self.gather(unit, backward=True)
                place = self.order.index(layer)
                if place:
                    self.gather_ahead(self.units[self.order[place - 1]])
                if again:
                    again()

            y.node.before = before
        if not self.keeps(layer):
            self.release(unit)
        return y

    def accumulate(self, weight, grad):
        self.unit_of[weight].grads[weight] = grad.becomes("unsharded")

    def reduce(self, unit):
        """Gradients of a unit, whole, become this rank's share in what it is stored in."""
        raise NotImplementedError

    def output(self, unit):
        """What a reduce-scatter makes: a share in the type of the reduction, which is that of what is stored."""
        output = self.ag.new(unit.reduced_whole / self.plan.shards, 1, "communication")
        if unit.reduced is None and not self.plan.offloads_optimizer:
            unit.reduced = output.becomes("gradients")

    def end_pass(self):
        for unit in self.units.values():
            self.reduce(unit)

    def step(self):
        if self.plan.args.optim == "adamw_torch" and not self.plan.offloads_optimizer:
            _ = self.ag.new(self.own, 4, "optimizer")
        for unit in self.units.values():
            unit.reduced = None


class Fsdp2(Gathered):
    """Gathers into a flat buffer and copies it out; in the forward pass the buffer lives until the next layer's, in
    the backward pass the next layer is gathered while one computes. Reduces through a buffer of the gradients' size,
    which lives until the next reduction, as does the last gradient until this one is done (foreach_reduce's loop)."""

    deferred = reducing = None

    def gather(self, unit, backward=False):
        if unit.whole is not None:
            return
        self.gather_ahead(unit)
        unit.whole = self.ag.new(unit.gathered, 1, "unsharded")
        if (
            not backward
        ):  # until the next one is copied out of its own, so that copying and gathering overlap
            self.deferred = unit.flat
        unit.flat = None

    def gather_ahead(self, unit):
        """Fill the flat buffer of a unit; shards that compute in fewer bytes than they are stored in are cast
        before."""
        if unit.flat is None and unit.whole is None:
            cast = self.ag.new(unit.casts, 1, "communication")
            unit.flat = self.ag.new(unit.gathered, 1, "communication")
            del cast

    def reduce(self, unit):
        self.release(unit)
        if not unit.grads:
            return
        self.reducing = None
        self.reducing = self.ag.new(unit.reduced_whole, 1, "communication")
        last = next(unit.grads[weight] for weight in reversed(unit.weights) if weight in unit.grads)
        unit.grads = {}
        self.output(unit)
        del last

    def end_forward(self):
        self.deferred = None

    def end_pass(self):
        super().end_pass()
        self.reducing = self.deferred = None


class Fsdp1(Gathered):
    """Gathers in place, into the flat parameter of a unit, of which the weights are views. autograd gives a flat
    gradient: once all of a unit's are there, it concatenates them (split_with_sizes_backward). The root, which holds
    embedding and head, is whole from the start of a pass to its end. NO_SHARD: parameters are whole anyway, but for
    the copy in which they compute in mixed precision; so is the flat gradient."""

    def gather(self, unit, backward=False):
        if unit.whole is not None or (self.plan.shards == 1 and not unit.casts):
            return
        cast = self.ag.new(unit.casts if self.plan.shards > 1 else 0, 1, "communication")
        unit.whole = self.ag.new(unit.gathered, 1, "unsharded")
        del cast

    def gather_ahead(self, unit):
        if self.plan.prefetches:
            self.gather(unit)

    def keeps(self, layer):
        return super().keeps(layer) and self.plan.shards > 1

    def reduce(self, unit):
        if unit.grads:
            flat = self.ag.new(unit.trained_whole, 1, "unsharded")
            unit.grads = {}
            self.release(unit)
            if unit.reduced_whole != unit.trained_whole:
                cast = self.ag.new(unit.reduced_whole, 1, "unsharded")
            if self.plan.shards > 1:
                self.output(unit)
            elif unit.reduced is None:
                unit.reduced = (cast if unit.casts else flat).becomes("gradients")
        self.release(unit)
