"""What a rank holds under each strategy: at rest, around each layer of a pass, and at the optimizer step.

One class for each engine: `Whole` (one process, DDP, ZeRO-0 to 2, whose parameters are whole), `Gathered` (FSDP1,
FSDP2 and ZeRO-3, which gather a layer's parameters, use them and let them go). Sources: torch's FSDPParamGroup and
foreach_all_gather, torch's FlatParamHandle, DeepSpeed's stage_1_and_2.py and stage3.py, accelerate's fsdp_utils.py;
README's table of bytes a parameter.
"""

import math

LOW = {"bf16": 2, "fp16": 2}
OPTIMIZER_BYTES = {
    "adamw_torch_fused": None,
    "adamw_torch": None,
    "paged_adamw_32bit": 8,
}  # None: two of the weight's own size
BLOCK_8BIT, LEAST_8BIT = 256, 4096  # bitsandbytes: an fp32 scale for 256 numbers; smaller tensors keep fp32 state
ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's default reduce_bucket_size, which accelerate leaves as it is
PERSISTENT = 100_000  # elements up to which ZeRO-3 keeps a tensor whole (stage3_param_persistence_threshold)
SUB_GROUP = 1_000_000_000  # elements of a ZeRO-3 optimizer step (sub_group_size)
FREE_AFTER = (
    1_000_000_000  # elements: ZeRO-3 keeps what it needs again before so many others (stage3_max_reuse_distance)
)


def state_bytes(weight, elements, width, optim):
    """Optimizer state of `elements` of a weight, two numbers each: in its own precision, or in what --optim says."""
    if optim in ("adamw_8bit", "paged_adamw_8bit") and weight.numel >= LEAST_8BIT:
        return 2 * (elements + 4 * math.ceil(elements / BLOCK_8BIT))
    return 2 * elements * (width if optim.startswith("adamw_torch") else 4)


class Whole:
    """Every rank has all parameters. DDP: all gradients as well, in the buckets that it reduces. ZeRO-0 to 2: fp32
    master weights and state, whole or 1/N, gradients whole or 1/N, and a bucket through which gradients pass."""

    def __init__(self, plan, weights, extra):
        self.plan, self.weights, self.extra = plan, weights, extra
        self.trained = [weight for weight in weights if weight.trains]
        self.elements = sum(weight.numel for weight in self.trained)

    def at_rest(self):
        """({category: bytes}, {category: bytes on the host}) between steps."""
        plan, device, host = self.plan, {}, {}
        for weight in self.weights:
            device[weight.kind] = device.get(weight.kind, 0) + weight.numel * weight.width
        device |= {name: device.get(name, 0) + size for name, size in self.extra.items()}
        if plan.engine == "zero":
            own, place = (
                math.ceil(self.elements / (plan.ranks if plan.stage else 1)),
                host if plan.offloads_optimizer else device,
            )
            if plan.low:
                place["master copies"] = 4 * own
            place["optimizer"] = self.zero_state(own)
            if plan.offloads_optimizer:
                place["gradients"] = 4 * own
        else:
            device["optimizer"] = sum(state_bytes(w, w.numel, w.stored, plan.args.optim) for w in self.trained)
            if plan.args.optim.startswith("paged"):
                host["optimizer"] = device.pop("optimizer")
        if plan.engine == "ddp":
            device["gradients"] = sum(weight.numel * weight.width for weight in self.trained)
        return device, host

    def zero_state(self, own):
        if self.plan.args.optim in ("adamw_8bit", "paged_adamw_8bit"):
            return 2 * (own + 4 * math.ceil(own / BLOCK_8BIT))
        return 8 * own

    def begin(self, autograd):
        self.ag, self.buffers = autograd, []
        if self.plan.engine == "zero" and self.plan.stage in (1, 2):
            self.buffers = [autograd.new(ZERO_BUCKET, self.plan.low or 4, "communication")]
        return self.accumulate

    def begin_pass(self, last):
        """Before a micro-batch; the last of a step is the one whose gradients are reduced."""
        self.last = last

    def end_forward(self):
        """Between forward and backward pass."""

    def around(self, layer, forward, x):
        checkpoints = self.plan.args.gradient_checkpointing and not isinstance(layer, str)
        return self.ag.checkpoint(forward, x) if checkpoints else forward(x)

    def accumulate(self, weight, grad):
        plan = self.plan
        if plan.engine == "ddp" and self.last:
            weight.grad = None  # copied into its bucket
        elif plan.engine == "zero" and plan.stage == 2:
            own = math.ceil(weight.numel / plan.ranks)
            if weight.grad is None and not plan.offloads_optimizer:
                weight.grad = self.ag.new(own, weight.width, "gradients")
        else:
            self.ag.keep_gradient(weight, grad)

    def end_pass(self):
        """After a micro-batch."""

    def step(self):
        """The optimizer: fused kernels make nothing, torch's loop over lists a tensor for each weight, ZeRO gradients
        in fp32."""
        plan, self.buffers = self.plan, []
        if plan.engine == "zero":
            own = math.ceil(self.elements / (plan.ranks if plan.stage else 1))
            _ = self.ag.new(0 if plan.offloads_optimizer else own, 4, "gradients")
        elif plan.args.optim == "adamw_torch":
            _ = self.ag.new(sum(weight.numel * weight.stored for weight in self.trained), 1, "optimizer")
        for weight in self.trained:
            weight.grad = None


class Unit:
    """Parameters that are gathered together: elements of all ranks with padding, of which a rank has 1/N."""

    def __init__(self, weights, plan):
        self.weights, n = weights, plan.shards
        rows = plan.engine == "fsdp2"  # which cuts by rows, the others flat
        self.shares = {w: math.ceil(w.rows / n) * (w.numel // w.rows) if rows else w.numel / n for w in weights}
        self.gathered = sum(share * n * w.width for w, share in self.shares.items())
        self.trained = sum(share * n * w.width for w, share in self.shares.items() if w.trains)
        self.whole = self.flat = self.reduced = None
        self.grads, self.next = [], None


class Gathered(Whole):
    """FSDP1, FSDP2, ZeRO-3: 1/N of everything at rest, and around a layer its parameters whole, in what they compute
    in.

    FSDP2 gathers into a buffer and copies it out; in the forward pass the buffer lives until the next layer's, in the
    backward pass the next layer is gathered while one computes. FSDP1 and ZeRO-3 gather in place. Gradients of a
    layer are whole until the layer is done; then they are reduced into 1/N: FSDP through a buffer of their size,
    ZeRO-3 through its bucket."""

    def __init__(self, plan, weights, extra, units):
        super().__init__(plan, weights, extra)
        self.units = {name: Unit(members, plan) for name, members in units.items() if members}
        self.order = list(self.units)
        self.unit_of = {weight: unit for unit in self.units.values() for weight in unit.weights}
        self.deferred = self.reducing = None

    def at_rest(self):
        plan, device, host = self.plan, dict(self.extra), {}
        place = host if plan.offloads_parameters else device
        zero = plan.engine == "zero"
        for unit in self.units.values():
            for weight, share in unit.shares.items():
                width = weight.width if zero else weight.stored
                place[weight.kind] = place.get(weight.kind, 0) + math.ceil(share) * width
                if zero and weight.numel <= PERSISTENT:
                    device["unsharded"] = device.get("unsharded", 0) + weight.numel * weight.width
        own = math.ceil(sum(share for unit in self.units.values() for w, share in unit.shares.items() if w.trains))
        states = host if plan.offloads_optimizer else device
        if zero:
            states["master copies"] = 4 * own * bool(plan.low)
            states["optimizer"] = self.zero_state(own)
            states["gradients"] = (plan.low or 4) * own
            if plan.offloads_optimizer:
                states["gradients"] += 4 * own
            device["communication"] = ZERO_BUCKET * (plan.low or 4)
        else:
            shares = [
                (w, math.ceil(share)) for unit in self.units.values() for w, share in unit.shares.items() if w.trains
            ]
            states["optimizer"] = sum(state_bytes(w, share, w.stored, plan.args.optim) for w, share in shares)
            if plan.offloads_optimizer:
                states["gradients"] = sum(share * w.stored for w, share in shares)
        return device, host

    def begin(self, autograd):
        self.ag = autograd
        return self.accumulate

    def gather(self, unit, backward=False):
        """Make a unit whole, if it is not; FSDP2's flat buffer may have been filled before."""
        ag = self.ag
        if unit.whole is not None:
            return
        if self.plan.engine != "fsdp2":
            unit.whole = ag.new(unit.gathered, 1, "unsharded")
            return
        self.prefetch(unit)
        unit.whole = ag.new(unit.gathered, 1, "unsharded")
        if not backward:
            self.deferred = (
                unit.flat
            )  # until the next one is copied out of its own, so that copying and gathering overlap
        unit.flat = None

    def prefetch(self, unit):
        """Fill the flat buffer of a unit; shards that compute in fewer bytes than they are stored in are cast
        before."""
        if unit.flat is None and unit.whole is None:
            casts = sum(share * w.width for w, share in unit.shares.items() if w.stored != w.width)
            cast = self.ag.new(casts, 1, "communication")
            unit.flat = self.ag.new(unit.gathered, 1, "communication")
            del cast

    def release(self, unit):
        unit.whole = None

    def around(self, layer, forward, x):
        unit, at_start = self.units.get(layer), self.plan.gathers_tail_first
        if layer == "embedding" and at_start:
            self.gather(self.units["tail"])
        if unit is None:
            return super().around(layer, forward, x)
        self.gather(unit)
        if x is not None and x.node and not (layer == "tail" and at_start):  # which is done when all is
            x = self.ag.op(x.numel, x.width, [x], views=True, storage=x.storage)
            x.node.before = lambda: self.reduce(unit)
        y = super().around(layer, forward, x)
        if y.node:
            again = y.node.before

            def before():
                self.gather(unit, backward=True)
                place = self.order.index(layer)
                if self.plan.engine == "fsdp2" and place:
                    self.prefetch(self.units[self.order[place - 1]])
                if again:
                    again()

            y.node.before = before
        if self.plan.reshards and layer != "tail":
            self.release(unit)
        return y

    def accumulate(self, weight, grad):
        self.unit_of[weight].grads.append(grad.becomes("unsharded"))

    def reduce(self, unit):
        """Gradients of a unit, whole, become this rank's share in what it is stored in."""
        plan, ag = self.plan, self.ag
        self.release(unit)
        if not unit.grads:
            return
        if plan.engine == "zero":
            unit.grads = []
            return
        self.reducing = None
        self.reducing = ag.new(unit.trained, 1, "communication")
        unit.grads = []
        trained = [(w, share) for w, share in unit.shares.items() if w.trains]
        output = ag.new(sum(share * w.width for w, share in trained), 1, "communication")
        if any(w.stored != w.width for w, _ in trained):
            output = ag.new(sum(share * w.stored for w, share in trained), 1, "communication")
        if unit.reduced is None and not plan.offloads_optimizer:
            unit.reduced = output.becomes("gradients")
        if plan.engine == "fsdp1":
            self.reducing = None

    def end_forward(self):
        self.deferred = None

    def end_pass(self):
        for unit in self.units.values():
            self.reduce(unit)
        self.reducing = self.deferred = None

    def step(self):
        plan = self.plan
        own = sum(share for unit in self.units.values() for w, share in unit.shares.items() if w.trains)
        if plan.engine == "zero" and not plan.offloads_optimizer:
            _ = self.ag.new(min(own, SUB_GROUP), 4, "gradients")
        elif plan.args.optim == "adamw_torch" and not plan.offloads_optimizer:
            _ = self.ag.new(own, 4, "optimizer")
        for unit in self.units.values():
            unit.reduced = None
