# SPDX-License-Identifier: Apache-2.0
"""What a rank holds under each engine: arithmetic over the phases of a micro-batch.

An engine is a function over phases. It yields what is held beside what is held at rest, as
{category: bytes}, at each moment that may be the highest: within a phase, when parameters are
gathered before it, when gradients are reduced after it, and in the optimizer's step. With P trained
parameters of b bytes each, AdamW and N ranks, a rank holds at rest, in bytes:

                parameters    gradients     AdamW's two numbers    fp32 copies
    DDP         b P           b P           2 b P
    FSDP        b P / N                     2 b P / N
    ZeRO-1, 2   b P                         8 P / N                4 P / N
    ZeRO-3      b P / N       4 P / N       8 P / N                4 P / N

evidence/test_planner.py compares each with live tensors.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .plan import Plan
from .trace import Phase, Profile, Weight

Sizes = Mapping[str, float]  # {category: bytes}
FP32 = 4
# bitsandbytes' 8-bit optimizers
BLOCK_8BIT = 256  # numbers that share an fp32 scale
LEAST_8BIT = 4096  # elements: the state of smaller tensors stays in fp32
# DeepSpeed, in elements
BUCKET = 500_000_000  # reduce_bucket_size, and of stage 0's buckets
PREFETCHED = 50_000_000  # gathered ahead at a time
PERSISTENT = 100_000  # the largest parameter that stays whole
MOST_LIVE = 1_000_000_000  # whole at a time, and how soon a parameter must be used again to stay
NORM = 8  # bytes: the norm of each gradient is computed in fp64


@dataclass(frozen=True)
class Held:
    """What a rank holds at the peak on its device, and on its host: {category: bytes}."""

    device: Sizes
    host: Sizes

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device."""
        return round(sum(self.device.values()))


def peak_of(plan: Plan, profile: Profile, evaluated: Profile | None = None) -> Held:
    """Return what a rank holds at the highest moment of an optimizer step.

    Args:
        evaluated: the profile of a batch of evaluation, which is run between steps.
    """
    engines = {"single": replica, "ddp": replica, "fsdp1": fsdp1, "fsdp2": fsdp2, "zero": zero}
    engine = engines[plan.engine]
    if plan.stage == 3:
        engine = zero3
    device, host = at_rest(plan, profile)
    moments: list[Sizes] = list(engine(plan, profile))
    if evaluated is not None:
        moments += list(engine(plan, evaluated))
    highest = max(moments, key=lambda moment: sum(moment.values()))
    for category, size in highest.items():
        device[category] = device.get(category, 0) + size
    return Held(
        {category: round(size) for category, size in device.items() if size},
        {category: round(size) for category, size in host.items() if size},
    )


def accumulates(plan: Plan) -> bool:
    """Return whether gradients of several micro-batches are added up."""
    return plan.args.gradient_accumulation_steps > 1


def total(weights: list[Weight], size: Callable[[Weight], float]) -> float:
    """Return the sum of what each trained weight takes."""
    return sum(size(weight) for weight in weights if weight.trains)


# ---- At rest ----
def stored(weight: Weight, plan: Plan) -> int:
    """Return the bytes per element in which a weight is stored.

    accelerate keeps what FSDP trains in mixed precision in fp32.
    """
    if not plan.engine.startswith("fsdp"):
        return weight.itemsize
    return FP32 if plan.low and weight.trains else weight.loaded


def share(weight: Weight, plan: Plan) -> float:
    """Return the elements of a weight that a rank has at rest.

    FSDP2 splits rows; the others split a flat buffer of many weights.
    """
    if plan.engine == "fsdp2":
        return math.ceil(weight.rows / plan.shards) * (weight.numel // weight.rows)
    if plan.engine == "fsdp1":
        return weight.numel / plan.shards
    if plan.engine == "zero" and plan.stage == 3:
        return math.ceil(weight.numel / plan.ranks)
    return weight.numel


def state_bytes(weight: Weight, elements: float, itemsize: int, optim: str) -> float:
    """Return the bytes of AdamW's two numbers for some elements of a weight.

    torch keeps them in the weight's precision, bitsandbytes in fp32 or 8 bits; those of embeddings
    and small tensors in fp32.
    """
    if optim.startswith("adamw_torch"):
        return 2 * elements * itemsize
    if optim.endswith("8bit") and not weight.is_embedding and weight.numel >= LEAST_8BIT:
        return 2 * (elements + FP32 * math.ceil(elements / BLOCK_8BIT))
    return 2 * elements * FP32


def at_rest(plan: Plan, profile: Profile) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank holds between steps, on its device and on its host."""
    optim = plan.args.optim
    weights = profile.weights
    device: dict[str, float] = {"quantization": profile.scales}
    host: dict[str, float] = {}
    parameters = host if plan.offloads_parameters else device
    states = host if plan.offloads_optimizer or optim.startswith("paged") else device
    parameters["parameters"] = sum(
        math.ceil(share(weight, plan)) * stored(weight, plan) for weight in weights
    )
    if plan.engine == "zero":
        add_zero_at_rest(plan, weights, device, states)
        return device, host
    states["optimizer"] = total(
        weights,
        lambda weight: state_bytes(
            weight, math.ceil(share(weight, plan)), stored(weight, plan), optim
        ),
    )
    if plan.engine == "ddp" or plan.offloads_optimizer:
        place = device if plan.engine == "ddp" else host  # DDP's are views of its buckets.
        place["gradients"] = total(weights, lambda w: math.ceil(share(w, plan)) * stored(w, plan))
    return device, host


def add_zero_at_rest(
    plan: Plan, weights: list[Weight], device: dict[str, float], states: dict[str, float]
) -> None:
    """Add what DeepSpeed holds between steps beside parameters.

    Without master copies, in stage 0 in fp32, the states are those of the weights themselves.
    """
    own = elements_updated(plan, weights)
    if plan.low or plan.stage:
        states["master copies"] = FP32 * own
    states["optimizer"] = 2 * FP32 * own
    if plan.stage == 3:
        device["unsharded"] = sum(
            weight.numel * weight.itemsize for weight in weights if weight.numel <= PERSISTENT
        )
        device["communication"] = FP32 * BUCKET  # It is never freed.
        states["gradients"] = FP32 * own
        if plan.offloads_optimizer:
            states["communication"] = FP32 * own  # gradients of a micro-batch
    elif plan.offloads_optimizer:
        # In transit: sums of micro-batches, new weights, and one gradient
        item = plan.itemsize
        largest = largest_trained(weights)
        sums = elements_in_part(weights, plan.ranks) if accumulates(plan) else 0
        states["gradients"] = FP32 * own
        states["communication"] = item * (sums + own + largest)
        device["communication"] = item * largest


def elements_updated(plan: Plan, weights: list[Weight]) -> int:
    """Return how many elements the optimizer of a rank updates under DeepSpeed."""
    if plan.stage == 3:
        return round(total(weights, lambda weight: share(weight, plan)))
    return math.ceil(total(weights, lambda w: w.numel) / (plan.ranks if plan.stage else 1))


def largest_trained(weights: list[Weight]) -> int:
    """Return the elements of the largest weight that is trained."""
    return max((weight.numel for weight in weights if weight.trains), default=0)


def elements_in_part(weights: list[Weight], parts: int) -> int:
    """Return the elements of all weights that the fullest rank has a piece of.

    ZeRO concatenates weights in a flat buffer, split into equal parts, one for matrices and one for
    vectors: the recipe's groups with and without weight decay.
    """
    found = 0
    for is_vector in (False, True):
        sizes = [w.numel for w in weights if w.trains and (w.rows == w.numel) == is_vector]
        part = math.ceil(sum(sizes) / parts)
        elements = [0] * parts
        start = 0
        for size in sizes:
            for rank in range(start // part, min((start + size - 1) // part, parts - 1) + 1):
                elements[rank] += size
            start += size
        found += max(elements)
    return found


# ---- One process, and DDP ----
def replica(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of one process and DDP, whose gradients are held at any time."""
    whole = total(profile.weights, lambda weight: weight.numel * weight.itemsize)
    finished = 0.0
    if accumulates(plan):
        finished = whole
    for phase in profile.phases:
        yield {"activations": phase.high, "gradients": finished}
        if plan.engine == "single" and not accumulates(plan):
            finished += phase.gradients
    if plan.engine == "ddp":
        whole = 0.0  # Its buckets are there at rest.
    yield step(plan, profile, {"gradients": whole})


def step(plan: Plan, profile: Profile, held: Sizes) -> Sizes:
    """Return what the optimizer's step holds; torch's foreach takes a tensor for each weight."""
    if plan.args.optim == "adamw_torch" and not plan.offloads_optimizer:
        size = total(profile.weights, lambda w: math.ceil(share(w, plan)) * stored(w, plan))
        return {**held, "optimizer": size}
    return held


# ---- FSDP ----
@dataclass
class Units:
    """What the engine moves around each unit, in bytes, one number per unit.

    Attributes:
        whole: all parameters, in the precision that the model computes with.
        cast: this rank's shards that are cast to it before they are gathered.
        reduced: all gradients, in the precision in which they are reduced: fp32 under mixed
            precision (reduce_in_fp32 of the recipes).
        gradients: all gradients, as the backward pass leaves them.
        last: the last of them.
    """

    whole: list[float]
    cast: list[float]
    reduced: list[float]
    gradients: list[float]
    last: list[float]


def units_of(plan: Plan, profile: Profile, weights: Iterable[Weight]) -> Units:
    """Return what FSDP moves around each unit of a profile for these weights."""
    units = Units(*([0.0] * profile.units for _ in range(5)))
    for weight in weights:
        number = weight.unit
        own = share(weight, plan)
        units.whole[number] += own * plan.shards * weight.itemsize
        if stored(weight, plan) != weight.itemsize:
            units.cast[number] += own * weight.itemsize
        if weight.trains:
            units.last[number] = own * plan.shards * weight.itemsize
            units.gradients[number] += units.last[number]
            units.reduced[number] += own * plan.shards * (FP32 if plan.low else weight.itemsize)
    return units


@dataclass
class Flow:
    """What FSDP holds beside shards while a micro-batch goes through the model, in bytes.

    Attributes:
        whole: parameters of units that are whole; `root` those of FSDP1's root.
        buffer: what a unit was gathered into; `ahead` that of the next unit in a backward pass.
        reducing: the buffer of the last reduction.
        gradients: sums of earlier micro-batches, and shares and whole gradients of this one.
    """

    gradients: float
    whole: dict[int, float]
    root: float = 0.0
    buffer: float = 0.0
    ahead: float = 0.0
    reducing: float = 0.0

    def moment(
        self,
        activations: float,
        unsharded: float = 0,
        communication: float = 0,
        gradients: float = 0,
    ) -> Sizes:
        """Return what is held beside activations, and more of each category."""
        return {
            "activations": activations,
            "gradients": self.gradients + gradients,
            "unsharded": self.root + sum(self.whole.values()) + unsharded,
            "communication": self.buffer + self.ahead + self.reducing + communication,
        }


def fsdp2(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of FSDP2, which gathers into a flat buffer and copies out of it.

    In the forward pass that buffer lives until the next layer's is copied out. In the backward pass
    the next layer is gathered while one is computed. Gradients are reduced through a buffer of
    their size, which lives until the next reduction; the last gradient lives until its own is done.
    Between replicas the shares are kept to the end of the pass.
    """
    units = units_of(plan, profile, profile.weights)
    tail = profile.units - 1
    shares = [size / plan.shards for size in units.reduced]
    sums = 0.0
    keeps_shares = not plan.offloads_optimizer
    if accumulates(plan) and keeps_shares:
        sums = sum(shares)
        keeps_shares = plan.replicas > 1
    # A tail that has the embedding too is in use in the whole pass
    flow = Flow(sums, {tail: units.whole[tail]} if profile.is_tied else {})
    for phase in profile.phases:
        if not phase.is_backward:
            yield from forward_of_fsdp2(flow, units, phase)
            keeps_whole = phase.unit == tail or not plan.reshards
            if not keeps_whole:
                flow.whole.pop(phase.unit, None)
            continue
        flow.buffer = 0.0
        yield from backward_of_fsdp2(flow, units, phase)
        if profile.is_tied and phase.unit == tail:
            continue  # It is in use until the embedding is done.
        flow.whole.pop(phase.unit, None)
        if units.reduced[phase.unit]:
            yield from reduced_by_fsdp2(flow, units, phase, shares[phase.unit])
            if keeps_shares:
                flow.gradients += shares[phase.unit]
    if profile.is_tied and units.reduced[tail]:
        of_tail = sum(phase.gradients for phase in profile.phases if phase.unit in (0, tail))
        flow.reducing = units.reduced[tail]
        yield flow.moment(of_tail)
    if not plan.offloads_optimizer:
        yield step(plan, profile, {"gradients": sum(shares)})


def reduced_by_fsdp2(flow: Flow, units: Units, phase: Phase, share: float) -> Iterator[Sizes]:
    """Yield the moments in which the gradients of a unit are reduced to a rank's share."""
    flow.reducing = units.reduced[phase.unit]
    yield flow.moment(phase.end + phase.gradients)
    last = min(phase.gradients, units.last[phase.unit])
    yield flow.moment(phase.end + last, communication=share)


def forward_of_fsdp2(flow: Flow, units: Units, phase: Phase) -> Iterator[Sizes]:
    """Yield the moments of a unit's forward pass, before which it is gathered."""
    size = units.whole[phase.unit]
    if phase.unit not in flow.whole and size:
        yield flow.moment(phase.start, communication=units.cast[phase.unit] + size)
        yield flow.moment(phase.start, communication=size, unsharded=size)
        flow.buffer = size
        flow.whole[phase.unit] = size
    yield flow.moment(phase.high)


def backward_of_fsdp2(flow: Flow, units: Units, phase: Phase) -> Iterator[Sizes]:
    """Yield the moments of a unit's backward pass, in which the one before it is gathered ahead."""
    size = units.whole[phase.unit]
    if phase.unit not in flow.whole and size:
        yield flow.moment(phase.start, communication=size - flow.ahead, unsharded=size)
        flow.whole[phase.unit] = size
    flow.ahead = 0.0
    before = phase.unit - 1
    if before >= 0 and before not in flow.whole:
        flow.ahead = units.whole[before]
        yield flow.moment(phase.start, communication=units.cast[before])
    yield flow.moment(phase.high)


def fsdp1(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of FSDP1, which gathers in place into the flat parameter of a unit.

    autograd returns a flat gradient: once all gradients of a unit are there it concatenates them.
    The root, which holds embedding and tail, is whole from the start of a pass to its end, and is
    reduced last. What peft adds has units of its own (wrap_adapters_for_fsdp1 of the recipes).
    Under NO_SHARD parameters and gradients are whole at any time; only the copy in which mixed
    precision computes comes and goes.
    """
    is_sharded = plan.shards > 1
    uses_peft = plan.args.use_peft
    root = (0, profile.units - 1)
    base = units_of(plan, profile, [w for w in profile.weights if not (uses_peft and w.trains)])
    added = units_of(plan, profile, [w for w in profile.weights if uses_peft and w.trains])
    reduced = [one + other for one, other in zip(base.reduced, added.reduced, strict=True)]
    flow = Flow(0.0, {})
    if accumulates(plan):
        flow.gradients = sum(reduced) / plan.shards
    sizes, casts = around_units_of_fsdp1(plan, base, added)
    if is_sharded or plan.low is not None:
        flow.root = sum(base.whole[unit] for unit in root)
    waiting = 0.0  # gradients of the root
    for phase in profile.phases:
        unit = phase.unit
        if unit not in flow.whole:
            flow.whole[unit] = sizes[unit]
            yield flow.moment(phase.start, communication=casts[unit])
        if phase.is_backward and plan.prefetches and is_before_layer(plan, profile, unit):
            flow.whole.setdefault(unit - 1, sizes[unit - 1])
        yield flow.moment(phase.high)
        if phase.is_backward and phase.gradients and (uses_peft or unit not in root):
            yield from reduce_flat(plan, flow, phase.end, phase.gradients, reduced[unit], unit)
        elif phase.is_backward and phase.gradients:
            waiting += phase.gradients
            flow.gradients += phase.gradients
            continue
        if phase.is_backward or plan.reshards or not is_sharded:
            flow.whole.pop(unit, None)
    flow.whole = {}
    if waiting:
        flow.gradients -= waiting
        of_root = sum(reduced[unit] for unit in root)
        yield from reduce_flat(plan, flow, 0, waiting, of_root, None)
    yield step(plan, profile, {"gradients": sum(reduced) / plan.shards})


def around_units_of_fsdp1(plan: Plan, base: Units, added: Units) -> tuple[list[float], list[float]]:
    """Return the bytes that FSDP1 gathers around each unit but the root, and casts for that.

    Args:
        added: what peft has added, also to the root.
    """
    sizes = list(added.whole)
    casts = list(added.cast)
    for unit in range(1, len(sizes) - 1):
        sizes[unit] += base.whole[unit]
        casts[unit] += base.cast[unit]
    nothing = [0.0] * len(sizes)
    if plan.shards > 1:
        return sizes, casts
    if plan.low is not None:
        return sizes, nothing
    return nothing, nothing


def is_before_layer(plan: Plan, profile: Profile, unit: int) -> bool:
    """Return whether FSDP1 gathers a layer ahead of a unit's backward pass.

    Under peft what comes next is an adapter or the copy of a norm, but before a plain tail.
    """
    tail = profile.units - 1
    if not plan.args.use_peft:
        return unit > 1
    copies_norm = any(w.trains and w.unit == tail and w.rows == w.numel for w in profile.weights)
    return unit == tail and not copies_norm


def reduce_flat(
    plan: Plan, flow: Flow, held: float, gradients: float, reduced: float, unit: int | None
) -> Iterator[Sizes]:
    """Yield the moments in which FSDP1 concatenates gradients, casts and reduces them.

    Args:
        held: by activations.
        gradients: bytes of a unit's gradients; reduced: in the precision of reductions.
        unit: whose parameters are freed in between; None for the root.
    """
    yield flow.moment(held, gradients=2 * gradients)
    if unit is None:
        flow.root = 0.0
    else:
        flow.whole.pop(unit, None)
    own = reduced / plan.shards
    whole = gradients
    if reduced != gradients:  # They are cast.
        whole += reduced
    in_flight = 0.0
    if plan.shards > 1:
        in_flight = own
    yield flow.moment(held, communication=in_flight, gradients=whole)
    if not accumulates(plan):
        flow.gradients += own


# ---- DeepSpeed ----
def zero(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of ZeRO stages 0 to 2, which keep parameters whole.

    From the first finished gradient on, stages 1 and 2 have a bucket. Stage 2 copies gradients into
    it; the other stages keep them whole, and fill buckets after the pass. Micro-batches are added
    in fp32 in stage 2 (reduce_in_fp32 of the recipes), but not with offload.
    """
    keeps_gradients = plan.stage < 2
    bucket = BUCKET * plan.itemsize
    if plan.stage == 0:
        bucket = 0
    held = gradients_of_zero(plan, profile)
    in_use = 0
    has_begun = False
    for phase in profile.phases:
        before, after = phase.high, phase.late
        if phase.is_backward and not keeps_gradients:
            before, after = phase.lean, phase.lean_late
        if phase.gradients and not has_begun:
            before = phase.early
        yield {"activations": before, "gradients": held, "communication": in_use}
        if phase.gradients:
            has_begun = True
            in_use = bucket
            yield {"activations": after, "gradients": held, "communication": in_use}
            if keeps_gradients and not accumulates(plan):
                held += phase.gradients
    if has_begun:  # not in an evaluation
        yield from reduced_by_zero(plan, profile)


def gradients_of_zero(plan: Plan, profile: Profile) -> float:
    """Return the bytes of gradients of earlier micro-batches that ZeRO-0 to 2 keep."""
    if not accumulates(plan):
        return 0.0
    if plan.stage < 2:
        return total(profile.weights, lambda weight: weight.numel) * plan.itemsize
    if plan.offloads_optimizer:
        return 0.0
    if plan.low is not None:
        return elements_updated(plan, profile.weights) * FP32
    return elements_in_part(profile.weights, plan.ranks) * plan.itemsize


def reduced_by_zero(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of ZeRO-0 to 2 after the backward pass, and of the step.

    A bucket is reduced through a flat copy and, under mixed precision, an fp32 copy of that.
    """
    item = plan.itemsize
    elements = total(profile.weights, lambda weight: weight.numel)
    own = elements_updated(plan, profile.weights)
    flat = min(elements, BUCKET) * item
    fp32_copies = 0
    if plan.low is not None:
        flat += min(elements, BUCKET) * FP32
        fp32_copies = own * FP32
    if plan.stage == 0:
        yield {"gradients": elements * item, "communication": flat}
        yield step(plan, profile, {"gradients": elements * item + fp32_copies})
        return
    bucket = BUCKET * item
    if plan.offloads_optimizer:
        yield {"communication": bucket + flat}
        return
    norm = min(largest_trained(profile.weights), own) * NORM
    if plan.stage == 2 and plan.low is not None:
        yield {"gradients": fp32_copies, "communication": bucket + flat}
        yield {"gradients": fp32_copies + norm}
        yield step(plan, profile, {"gradients": fp32_copies})
        return
    part = elements_in_part(profile.weights, plan.ranks) * item
    summed = 0.0
    if plan.stage == 2:
        summed = gradients_of_zero(plan, profile)
    yield {"gradients": summed, "communication": bucket + flat}
    yield {"gradients": summed + part, "communication": bucket}
    yield {"gradients": part + norm}
    yield step(plan, profile, {"gradients": part + own * item + fp32_copies})


@dataclass
class Gathering:
    """Units that ZeRO-3 gathers through one flat buffer.

    Attributes:
        waiting: those that have not been computed yet.
        is_copied: whether their parameters have been copied out of the buffer.
    """

    units: list[int]
    waiting: set[int]
    is_copied: bool = False


def zero3(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of ZeRO-3, which gathers ahead by the order of the pass before.

    Units that come next are gathered while one is computed, up to PREFETCHED elements at a time and
    MOST_LIVE in all: one in place, several through a flat buffer. They stay whole where they are
    used again within MOST_LIVE elements. Parameters up to PERSISTENT elements are always whole.
    """
    size, elements, number = split_parameters(profile)
    order = [phase.unit for phase in profile.phases]
    if profile.is_tied:
        order = [unit or profile.units - 1 for unit in order]
    whole: dict[int, float] = {}
    flight: list[Gathering] = []

    def moment(activations: float, communication: float = 0) -> Sizes:
        in_flight = sum(size[unit] for gathering in flight for unit in gathering.units)
        return {
            "activations": activations,
            "unsharded": sum(whole.values()),
            "communication": in_flight + communication,
        }

    for place, (unit, phase) in enumerate(zip(order, profile.phases, strict=True)):
        gathering = next((one for one in flight if unit in one.waiting), None)
        if gathering is None:
            whole.setdefault(unit, size[unit])
        elif not gathering.is_copied:
            gathering.is_copied = True
            whole |= {member: size[member] for member in gathering.units}
        there = set(whole).union(*(one.units for one in flight))
        wanted = gathered_ahead(order[place + 1 :], there, elements)
        if sum(number[one] for one in wanted) == 1:
            whole[wanted[0]] = size[wanted[0]]
        elif wanted:
            flight.append(Gathering(wanted, set(wanted)))
        yield moment(phase.lean)
        if gathering is not None:
            gathering.waiting.discard(unit)
        flight = [one for one in flight if one.waiting]
        soon = used_within(MOST_LIVE, order[place + 1 :], elements)
        whole = {one: kept for one, kept in whole.items() if one in soon}
    own = elements_updated(plan, profile.weights)
    trained = total(profile.weights, lambda weight: weight.numel)
    yield moment(0, communication=min(trained, BUCKET) * FP32)
    if not plan.offloads_optimizer:
        largest = math.ceil(largest_trained(profile.weights) / plan.ranks)
        yield step(plan, profile, {"gradients": min(own, MOST_LIVE) * FP32})
        yield {"gradients": largest * NORM}


def split_parameters(profile: Profile) -> tuple[list[float], list[int], list[int]]:
    """Return bytes, elements and number of the parameters that ZeRO-3 splits, by unit."""
    size = [0.0] * profile.units
    elements = [0] * profile.units
    number = [0] * profile.units
    for weight in profile.weights:
        if weight.numel > PERSISTENT and weight.is_used:
            size[weight.unit] += weight.numel * weight.itemsize
            elements[weight.unit] += weight.numel
            number[weight.unit] += 1
    return size, elements, number


def gathered_ahead(order: list[int], there: set[int], elements: list[int]) -> list[int]:
    """Return the units that are gathered together while another one is computed.

    Args:
        order: of the units that come next.
        there: units that are whole, or on their way.
    """
    room = min(MOST_LIVE - sum(elements[unit] for unit in there), PREFETCHED)
    wanted: list[int] = []
    for unit in order:
        if sum(elements[one] for one in wanted) >= room:
            break
        if unit not in there and unit not in wanted and elements[unit]:
            wanted.append(unit)
    return wanted


def used_within(distance: int, order: list[int], elements: list[int]) -> set[int]:
    """Return the units that come next in an order, until they have `distance` elements."""
    soon = set()
    for unit in order:
        if distance <= 0:
            break
        soon.add(unit)
        distance -= elements[unit]
    return soon


# ---- Saving ----
@dataclass(frozen=True)
class Saving:
    """The host memory of saving a checkpoint, in bytes, beside what a run trains with.

    Each rank copies the boxes that it writes to the host. What several ranks have is shared out
    between them, so that a rank writes about an equal part.

    Attributes:
        whole: all tensors of the checkpoint; `largest` is the largest one.
        share: those of a rank.
        host: what all ranks of a host need at most.
    """

    whole: int
    share: int
    largest: int
    host: int

    @property
    def most(self) -> int:
        """What a rank needs at most: its share and one tensor."""
        return self.share + self.largest


def saving_of(plan: Plan, weights: Iterable[Weight]) -> Saving:
    """Return what the ranks of a plan keep while they save a checkpoint; DeepSpeed's are fp32."""
    whole = 0.0
    largest = 0.0
    for weight in weights:
        if not weight.trains:
            continue
        itemsize = FP32 if plan.engine == "zero" else stored(weight, plan)
        state = state_bytes(weight, weight.whole, itemsize, plan.args.optim)
        whole += weight.whole * itemsize + state + FP32  # and the number of the step
        largest = max(largest, weight.whole * itemsize, state / 2)
    share_of_rank = round(whole / plan.ranks)
    per_host = plan.ranks // plan.machines
    host = round(whole / plan.machines) + per_host * round(largest)
    return Saving(round(whole), share_of_rank, round(largest), host)
