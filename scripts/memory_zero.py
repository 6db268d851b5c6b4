"""What a rank holds under DeepSpeed's ZeRO: `Zero`, stages 0 to 2, whose parameters are whole, and `Zero3`.

Sources: DeepSpeed's engine.py, unfused_optimizer.py (stage 0 in mixed precision), zero/stage_1_and_2.py,
zero/stage3.py, zero/partition_parameters.py and zero/partitioned_param_coordinator.py, with the settings that
accelerate leaves as they are.
"""

import math

from memory_ranks import BLOCK_8BIT, Gathered, Whole

BUCKET = 500_000_000  # elements: reduce_bucket_size, and of stage 0's buckets
PREFETCH = 50_000_000  # elements: stage3_prefetch_bucket_size
PERSISTENT = (
    100_000  # elements up to which ZeRO-3 keeps a tensor whole (stage3_param_persistence_threshold)
)
MOST_LIVE = 1_000_000_000  # elements that are prefetched at most, with those in use (stage3_max_live_parameters)
REUSE = 1_000_000_000  # elements: what is needed again before so many others stays (stage3_max_reuse_distance)
SUB_GROUP = 1_000_000_000  # elements that ZeRO-3 updates at a time (sub_group_size)
NORM = 8  # bytes: the norm of each gradient is computed in fp64


def zero_state(elements, optim):
    """AdamW's two numbers for each of the fp32 master weights."""
    if optim in ("adamw_8bit", "paged_adamw_8bit"):
        return 2 * (elements + 4 * math.ceil(elements / BLOCK_8BIT))
    return 8 * elements


def fullest_part(sizes, parts):
    """Elements of the tensors that a rank has a piece of, where n ranks share a flat buffer: the most of any rank."""
    part, start, found = math.ceil(sum(sizes) / parts), 0, [0] * parts
    for size in sizes:
        for rank in range(start // part, min((start + size - 1) // part + 1, parts)):
            found[rank] += size
        start += size
    return max(found)


class Bucket:
    """Gradients on their way to other ranks: copied into a buffer, and reduced once that is full, through a flat copy
    in which each rank's part is in one piece, and under mixed precision an fp32 copy of that (reduce_in_fp32 of the
    recipes). What is larger than the buffer waits as it is."""

    def __init__(self, autograd, width, buffer=None):
        self.ag, self.width, self.buffer, self.filled, self.waiting = autograd, width, buffer, 0, []

    def is_full_with(self, elements):
        return self.filled + elements > BUCKET

    def add(self, elements, grad):
        self.filled += elements
        if elements > BUCKET:
            self.waiting.append(grad)

    def reduce(self, meanwhile=0):
        """Empty the buffer. meanwhile: bytes that are needed for a moment while the flat copy is there."""
        flat = self.ag.new(self.filled, self.width, "communication")
        if self.width < 4:
            cast = self.ag.new(self.filled, 4, "communication")
            del cast
        _ = self.ag.new(meanwhile, 1, "gradients")
        del flat, _
        self.filled, self.waiting = 0, []


class Zero(Whole):
    """Parameters are whole. Stage 0: master weights (in mixed precision) and state too. Stages 1 and 2: fp32 master
    weights and state 1/N; stage 2 also gradients, of which tensors stay whole that lie in two ranks' parts."""

    def __init__(self, plan, weights, extra):
        super().__init__(plan, weights, extra)
        self.own = math.ceil(self.elements / (plan.ranks if plan.stage else 1))
        self.width = plan.low or 4
        self.largest = max((weight.numel for weight in self.trained), default=0)
        groups = [
            [w.numel for w in self.trained if (w.rows == w.numel) is norm] for norm in (False, True)
        ]
        self.in_part = sum(fullest_part(sizes, plan.ranks) for sizes in groups if sizes)
        self.bucket = self.part = self.sum = None
        # Micro-batches are added in fp32 (reduce_in_fp32 of the recipes)
        self.adds_in_fp32 = plan.stage == 2 and bool(plan.low) and not plan.offloads_optimizer

    def at_rest(self):
        plan, device, host = self.plan, self.parameters(), {}
        place = host if plan.offloads_optimizer else device
        if plan.low or plan.stage:
            place["master copies"] = 4 * self.own
        place["optimizer"] = zero_state(self.own, plan.args.optim)
        if (
            plan.offloads_optimizer
        ):  # what is on its way: sums of micro-batches, new weights, one gradient
            sums = self.in_part if plan.args.gradient_accumulation_steps > 1 else 0
            host["gradients"] = 4 * self.own
            host["communication"] = self.width * (sums + self.own + self.largest)
            device["communication"] = self.width * self.largest
        return device, host

    def accumulate(self, weight, grad):
        if self.plan.stage and self.bucket is None:
            self.bucket = Bucket(
                self.ag, self.width, self.ag.new(BUCKET, self.width, "communication")
            )
        if self.plan.stage == 2:
            self.into_bucket(weight, grad)
        else:
            self.ag.keep_gradient(weight, grad)

    def into_bucket(self, weight, grad):
        if self.bucket.is_full_with(weight.numel):
            self.reduce()
        self.bucket.add(weight.numel, grad)

    def reduce(self):
        """Empty the bucket; this rank's part is copied out of it."""
        on_device = not self.plan.offloads_optimizer
        if on_device and self.adds_in_fp32:  # at once into the flat part that the optimizer reads
            self.sum = self.sum or self.ag.new(self.own, 4, "gradients")
        self.bucket.reduce()
        if on_device and not self.adds_in_fp32:
            self.part = self.part or self.ag.new(self.in_part, self.width, "gradients")

    def end_pass(self):
        """Stage 2 reduces each micro-batch and adds it up, the others the last one."""
        if not self.plan.stage and self.last:
            flat = self.ag.new(min(self.elements, BUCKET), self.width, "communication")
            cast = self.ag.new(
                min(self.elements, BUCKET) if self.width < 4 else 0, 4, "communication"
            )
            del flat, cast
        if not self.bucket or self.plan.stage == 1 and not self.last:
            return
        if self.plan.stage == 1:
            for weight in self.trained:
                grad, weight.grad = weight.grad, None
                self.into_bucket(weight, grad)
                del grad
        self.reduce()
        self.sum = self.sum or self.part
        self.part = self.bucket = None

    def step(self):
        """Gradients in fp32: in stage 0 of mixed precision besides those of the model, else a flat copy first."""
        plan, ag = self.plan, self.ag
        if plan.offloads_optimizer:
            return
        if plan.stage:
            _ = ag.new(min(self.largest, self.own), NORM, "gradients")
            del _
        grads = (
            self.sum
            if self.adds_in_fp32
            else ag.new(self.own if plan.stage else 0, self.width, "gradients")
        )
        grads = ag.new(self.own, 4, "gradients") if plan.low and not self.adds_in_fp32 else grads
        self.sum = None
        if plan.args.optim == "adamw_torch":
            _ = ag.new(self.own, 4, "optimizer")
        del grads
        for weight in self.trained:
            weight.grad = None


class Gathering:
    """Parameters that were asked for together: one flat buffer, from which each is copied when the first is used, and
    which stays until the last is."""

    def __init__(self, weights, flat):
        self.weights, self.flat, self.copied = weights, flat, False


class Zero3(Gathered):
    """1/N of parameters, gradients, master weights and state at rest; small tensors are whole, besides.

    A module's parameters are gathered when it is called, and with each call up to PREFETCH elements of those that come
    next in the recorded order of a micro-batch, forward and backward pass, up to MOST_LIVE in all. What has been used
    is let go unless it is used again within REUSE elements."""

    def __init__(self, plan, weights, extra, units):
        super().__init__(plan, weights, extra, units)
        self.own = math.ceil(self.own)
        self.largest = max(
            (math.ceil(share) for unit in self.units.values() for _, share in unit.trained),
            default=0,
        )
        self.whole, self.inflight = {}, {}
        self.parts = self.parts_of_a_pass()
        self.trace = [weight for _, weights in self.parts for weight in weights]

    def at_rest(self):
        plan, device, host = self.plan, dict(self.extra), {}
        place, states = (
            host if off else device for off in (plan.offloads_parameters, plan.offloads_optimizer)
        )
        for unit in self.units.values():
            for weight, share in unit.shares.items():
                place[weight.kind] = place.get(weight.kind, 0) + math.ceil(share) * weight.width
                if weight.numel <= PERSISTENT:
                    device["unsharded"] = device.get("unsharded", 0) + weight.numel * weight.width
        states["master copies"] = 4 * self.own
        states["optimizer"] = zero_state(self.own, plan.args.optim)
        states["gradients"] = (
            4 * self.own
        )  # reduced and added in fp32 (reduce_in_fp32 of the recipes)
        if plan.offloads_optimizer:  # gradients on their way to those of the step
            host["communication"] = 4 * self.own
        device["communication"] = BUCKET * 4
        return device, host

    def parts_of_a_pass(self):
        """[(name of a unit, its large weights in the order of use)] of a forward and a backward pass."""
        large = {
            name: [w for w in unit.weights if w.numel > PERSISTENT]
            for name, unit in self.units.items()
        }
        if "embedding" not in large:  # tied to the head
            large = {"embedding": large["tail"]} | large
        forward, backward = list(large.items()), []
        for name, weights in reversed(forward):
            if name != "embedding" or any(weight.trains for weight in weights):
                again = (
                    weights
                    if self.plan.args.gradient_checkpointing and not isinstance(name, str)
                    else []
                )
                backward.append((name, again + weights[::-1]))
        return forward + backward

    def begin(self, autograd):
        autograd.keeps_inputs = True  # DeepSpeed's linear layer keeps them for frozen weights too
        self.bucket = Bucket(autograd, 4)
        return super().begin(autograd)

    def begin_pass(self, last):
        super().begin_pass(last)
        self.part, self.position, self.asked, self.live, self.skipped = 0, 0, 0, 0, {}
        for _ in range(2):  # the model's own modules, which have no parameters but prefetch
            self.prefetch()

    def ask(self, weights):
        """Gather weights: one in place, several through a flat buffer, into which shards on the host come by way of
        the device."""
        weights = [w for w in weights if w not in self.whole and w not in self.inflight]
        self.live += sum(weight.numel for weight in weights)
        if len(weights) == 1:
            self.whole[weights[0]] = self.ag.new(weights[0].numel, weights[0].width, "unsharded")
        elif weights:
            size = sum(weight.numel * weight.width for weight in weights)
            shards = self.ag.new(
                size / self.plan.ranks if self.plan.offloads_parameters else 0, 1, "communication"
            )
            gathering = Gathering(weights, self.ag.new(size, 1, "communication"))
            self.inflight |= dict.fromkeys(weights, gathering)
            del shards

    def prefetch(self):
        """Ask for what comes next; what is there already must stay until then."""
        room, wanted = min(MOST_LIVE - self.live, PREFETCH), {}
        while self.asked < len(self.trace) and sum(weight.numel for weight in wanted) < room:
            weight = self.trace[self.asked]
            self.skipped[weight] = self.asked
            if weight not in self.whole and weight not in self.inflight:
                wanted[weight] = None
            self.asked += 1
        self.ask(list(wanted))

    def use(self, weight):
        """The call of a module."""
        self.ask([weight])
        gathering = self.inflight.pop(weight, None)
        if gathering and not gathering.copied:
            self.whole |= {w: self.ag.new(w.numel, w.width, "unsharded") for w in gathering.weights}
            gathering.copied = True
        del gathering
        self.position += 1
        self.asked = max(self.asked, self.position)
        self.prefetch()

    def use_next_part(self):
        weights = self.parts[self.part][1]
        self.part += 1
        for weight in weights:
            self.use(weight)

    def let_go(self, weights):
        """Release what is not used again soon, nor was passed over when something later was asked for."""
        soon, distance = set(), 0
        for weight in self.trace[self.position :]:
            if distance >= REUSE:
                break
            soon.add(weight)
            distance += weight.numel
        for weight in weights:
            if (
                weight in self.whole
                and weight not in soon
                and self.skipped.get(weight, -1) < self.position
            ):
                del self.whole[weight]
                self.live -= weight.numel

    def gather(self, unit, backward=False):
        """All of a unit, in the order in which its modules are called."""
        self.use_next_part()

    def keeps(self, layer):
        return False

    def release(self, unit):
        self.let_go(unit.weights)

    def accumulate(self, weight, grad):
        if self.bucket.filled and self.bucket.is_full_with(weight.numel):
            self.empty_bucket()
        self.bucket.add(weight.numel, grad)

    def empty_bucket(self):
        """With offload the norm of each gradient is taken on its way to the host (stage3.py, partition_grads)."""
        self.bucket.reduce(NORM * self.largest if self.plan.offloads_optimizer else 0)

    def reduce(self, unit):
        self.release(unit)

    def end_pass(self):
        self.empty_bucket()
        self.whole, self.inflight = {}, {}

    def step(self):
        """Gradients in fp32, of a group of parameters at a time: flat copies of this rank's shares."""
        if self.plan.offloads_optimizer:
            return
        own = min(self.own, SUB_GROUP)
        _ = self.ag.new(self.largest, NORM, "gradients")
        del _
        grads = self.ag.new(own, 4, "gradients")
        if self.plan.args.optim == "adamw_torch":
            _ = self.ag.new(own, 4, "optimizer")
        del grads
