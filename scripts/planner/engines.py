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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .plan import Batch, Plan
from .trace import Phase, Profile, Weight, profile_of

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
    """What a rank holds on its device, and on its host: {category: bytes}."""

    device: dict[str, Any]
    host: dict[str, Any]

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device."""
        return round(sum(self.device.values()))


class Profiles:
    """Profiles of micro-batches, each traced once; engines and numbers of ranks share them."""

    def __init__(self) -> None:
        self._found: dict[Any, Profile] = {}

    def held(self, plan: Plan, batch: Batch) -> Held:
        """Return what a rank holds at its peak, in training or in evaluation."""
        evaluated = None
        lines = plan.args.per_device_eval_batch_size
        if plan.args.eval_strategy != "no" and lines * plan.sp > batch.lines:
            # DeepSpeed gives each rank whole rows in evaluation
            supervised = -(-batch.supervised * lines // batch.lines)
            evaluation = Batch(lines, batch.length, supervised)
            evaluated = self.of(replace(plan, sp=1), evaluation, trains=False)
        return peak_of(plan, self.of(plan, batch), evaluated)

    def of(self, plan: Plan, batch: Batch, trains: bool = True) -> Profile:
        """Return the profile of a micro-batch under all that a trace depends on."""
        args = replace(plan.args, gradient_accumulation_steps=1, optim="")
        engine = (plan.engine == "fsdp2", plan.engine == "zero", plan.stage == 3, plan.casts_to)
        key = (repr(args), engine, plan.mixed_precision, plan.tp, plan.cp, plan.sp, batch, trains)
        if key not in self._found:
            self._found[key] = profile_of(plan, batch, trains)
        return self._found[key]


def peak_of(plan: Plan, profile: Profile, evaluated: Profile | None = None) -> Held:
    """Return what a rank holds at the highest moment of an optimizer step.

    Args:
        evaluated: the profile of a batch of evaluation, which is run between steps.
    """
    engines = {"single": replica, "ddp": replica, "fsdp1": fsdp1, "fsdp2": fsdp2, "zero": zero}
    engine = zero3 if plan.stage == 3 else engines[plan.engine]
    held = at_rest(plan, profile)
    moments: list[Sizes] = list(engine(plan, profile))
    if evaluated is not None:
        moments += list(engine(plan, evaluated))
    highest = max(moments, key=lambda moment: sum(moment.values()))
    for category, size in highest.items():
        held.device[category] = held.device.get(category, 0) + size
    return Held(rounded(held.device), rounded(held.host))


def rounded(sizes: Sizes) -> dict[str, int]:
    """Return what is held of each category, without those of which nothing is."""
    return {category: round(size) for category, size in sizes.items() if size}


def accumulates(plan: Plan) -> bool:
    """Return whether gradients of several micro-batches are added up."""
    return plan.args.gradient_accumulation_steps > 1


# ---- At rest ----
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


def bytes_stored(weight: Weight, plan: Plan) -> int:
    """Return the bytes of a weight that a rank has at rest."""
    return math.ceil(share(weight, plan)) * weight.stored


def state_bytes(weight: Weight, plan: Plan) -> float:
    """Return the bytes of AdamW's two numbers for what a rank has of a weight.

    torch keeps them in the weight's precision, bitsandbytes in fp32 or 8 bits; those of embeddings
    and small tensors in fp32.
    """
    elements = math.ceil(share(weight, plan))
    optim = plan.args.optim
    if optim.startswith("adamw_torch"):
        return 2 * elements * weight.stored
    if optim.endswith("8bit") and not weight.is_embedding and weight.numel >= LEAST_8BIT:
        return 2 * (elements + FP32 * math.ceil(elements / BLOCK_8BIT))
    return 2 * elements * FP32


def at_rest(plan: Plan, profile: Profile) -> Held:
    """Return what a rank holds between steps."""
    device: dict[str, float] = {"quantization": profile.scales}
    host: dict[str, float] = {}
    parameters = host if plan.offloads_parameters else device
    states = host if plan.offloads_optimizer or plan.args.optim.startswith("paged") else device
    parameters["parameters"] = sum(bytes_stored(weight, plan) for weight in profile.weights)
    if plan.engine == "zero":
        add_zero_at_rest(plan, profile, device, states)
        return Held(device, host)
    states["optimizer"] = sum(state_bytes(weight, plan) for weight in profile.trained)
    if plan.engine == "ddp" or plan.offloads_optimizer:
        place = device if plan.engine == "ddp" else host  # DDP's are views of its buckets.
        place["gradients"] = sum(bytes_stored(weight, plan) for weight in profile.trained)
    return Held(device, host)


def add_zero_at_rest(
    plan: Plan, profile: Profile, device: dict[str, float], states: dict[str, float]
) -> None:
    """Add what DeepSpeed holds between steps beside parameters.

    Without master copies, in stage 0 in fp32, the states are those of the weights themselves.
    """
    own = elements_updated(plan, profile)
    if plan.low or plan.stage:
        states["master copies"] = FP32 * own
    states["optimizer"] = 2 * FP32 * own
    if plan.stage == 3:
        device["unsharded"] = sum(
            one.numel * one.itemsize for one in profile.weights if one.numel <= PERSISTENT
        )
        device["communication"] = FP32 * BUCKET  # It is never freed.
        states["gradients"] = FP32 * own
        if plan.offloads_optimizer:
            states["communication"] = FP32 * own  # gradients of a micro-batch
    elif plan.offloads_optimizer:
        # In transit: sums of micro-batches, new weights, and one gradient
        item = plan.itemsize
        largest = largest_trained(profile)
        sums = elements_in_part(profile, plan.ranks) if accumulates(plan) else 0
        states["gradients"] = FP32 * own
        states["communication"] = item * (sums + own + largest)
        device["communication"] = item * largest


def elements_updated(plan: Plan, profile: Profile) -> int:
    """Return how many elements the optimizer of a rank updates under DeepSpeed."""
    if plan.stage == 3:
        return round(sum(share(weight, plan) for weight in profile.trained))
    return math.ceil(elements_trained(profile) / (plan.ranks if plan.stage else 1))


def elements_trained(profile: Profile) -> int:
    """Return the elements of all weights that are trained."""
    return sum(weight.numel for weight in profile.trained)


def largest_trained(profile: Profile) -> int:
    """Return the elements of the largest weight that is trained."""
    return max((weight.numel for weight in profile.trained), default=0)


def elements_in_part(profile: Profile, parts: int) -> int:
    """Return the elements of all weights that the fullest rank has a piece of.

    ZeRO concatenates weights in a flat buffer, split into equal parts, one for matrices and one for
    vectors: the recipe's groups with and without weight decay.
    """
    found = 0
    for is_vector in (False, True):
        sizes = [w.numel for w in profile.trained if (w.rows == w.numel) == is_vector]
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
    whole = sum(weight.numel * weight.itemsize for weight in profile.trained)
    finished = whole if accumulates(plan) else 0
    for phase in profile.phases:
        yield {"activations": phase.high, "gradients": finished}
        if plan.engine == "single" and not accumulates(plan):
            finished += phase.gradients
    if plan.engine == "ddp":
        whole = 0  # Its buckets are there at rest.
    yield step(plan, profile, {"gradients": whole})


def step(plan: Plan, profile: Profile, held: Sizes) -> Sizes:
    """Return what the optimizer's step holds; torch's foreach takes a tensor for each weight."""
    if plan.args.optim == "adamw_torch" and not plan.offloads_optimizer:
        size = sum(bytes_stored(weight, plan) for weight in profile.trained)
        return {**held, "optimizer": size}
    return held


# ---- FSDP ----
@dataclass
class Unit:
    """What FSDP moves around a unit, in bytes.

    Attributes:
        whole: all parameters, in the precision that the model computes with.
        cast: this rank's shards that are cast to it before they are gathered.
        reduced: all gradients, in the precision in which they are reduced: fp32 under mixed
            precision (reduce_in_fp32 of the recipes).
        last: the last gradient, as the backward pass leaves it.
    """

    whole: float = 0.0
    cast: float = 0.0
    reduced: float = 0.0
    last: float = 0.0


def units_of(plan: Plan, profile: Profile, weights: Iterable[Weight]) -> list[Unit]:
    """Return what FSDP moves around each unit of a profile for these weights."""
    units = [Unit() for _ in range(profile.units)]
    for weight in weights:
        unit = units[weight.unit]
        own = share(weight, plan)
        whole = own * plan.shards
        unit.whole += whole * weight.itemsize
        if weight.stored != weight.itemsize:
            unit.cast += own * weight.itemsize
        if weight.trains:
            unit.last = whole * weight.itemsize
            unit.reduced += whole * (FP32 if plan.low else weight.itemsize)
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
    shares = sum(unit.reduced for unit in units) / plan.shards
    sums = 0.0
    keeps_shares = not plan.offloads_optimizer
    if accumulates(plan) and keeps_shares:
        sums = shares
        keeps_shares = plan.replicas > 1
    # A tail that has the embedding too is in use in the whole pass
    flow = Flow(sums, {tail: units[tail].whole} if profile.is_tied else {})
    for phase in profile.phases:
        number = phase.unit
        unit = units[number]
        yield from gathered_by_fsdp2(flow, unit, phase)
        if phase.is_backward and number > 0 and number - 1 not in flow.whole:
            flow.ahead = units[number - 1].whole
            yield flow.moment(phase.start, communication=units[number - 1].cast)
        yield flow.moment(phase.high)
        if number == tail and (profile.is_tied or not phase.is_backward):
            continue  # It stays in use, if it has the embedding too until that is done.
        if phase.is_backward or plan.reshards:
            flow.whole.pop(number, None)
        if phase.is_backward and unit.reduced:
            own = unit.reduced / plan.shards
            flow.reducing = unit.reduced
            yield flow.moment(phase.end + phase.gradients)
            yield flow.moment(phase.end + min(phase.gradients, unit.last), communication=own)
            if keeps_shares:
                flow.gradients += own
    if profile.is_tied and units[tail].reduced:
        of_tail = sum(phase.gradients for phase in profile.phases if phase.unit in (0, tail))
        flow.reducing = units[tail].reduced
        yield flow.moment(of_tail)
    if not plan.offloads_optimizer:
        yield step(plan, profile, {"gradients": shares})


def gathered_by_fsdp2(flow: Flow, unit: Unit, phase: Phase) -> Iterator[Sizes]:
    """Yield the moments in which a unit is gathered, if it is not whole."""
    size = unit.whole
    if phase.is_backward:
        flow.buffer = 0.0
    if phase.unit not in flow.whole and size:
        if not phase.is_backward:
            yield flow.moment(phase.start, communication=unit.cast + size)
        yield flow.moment(phase.start, communication=size - flow.ahead, unsharded=size)
        flow.whole[phase.unit] = size
        if not phase.is_backward:
            flow.buffer = size
    flow.ahead = 0.0


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
    base = [w for w in profile.weights if not (uses_peft and w.trains)]
    of_root = [weight for weight in base if weight.unit in root]
    others = [weight for weight in profile.weights if weight not in of_root]
    flow = Flow(0.0, {})
    reduced = [unit.reduced for unit in units_of(plan, profile, profile.weights)]
    if accumulates(plan):
        flow.gradients = sum(reduced) / plan.shards
    units = [Unit()] * profile.units
    if is_sharded or plan.low is not None:
        flow.root = sum(unit.whole for unit in units_of(plan, profile, of_root))
        units = units_of(plan, profile, others)
    waiting = 0.0  # gradients of the root
    for phase in profile.phases:
        number = phase.unit
        if number not in flow.whole:
            flow.whole[number] = units[number].whole
            cast = units[number].cast if is_sharded else 0
            yield flow.moment(phase.start, communication=cast)
        if phase.is_backward and gathers_ahead(plan, profile, number):
            flow.whole.setdefault(number - 1, units[number - 1].whole)
        yield flow.moment(phase.high)
        if phase.is_backward and phase.gradients and (uses_peft or number not in root):
            gradients = phase.gradients
            yield from reduce_flat(plan, flow, phase.end, gradients, reduced[number], number)
        elif phase.is_backward and phase.gradients:
            waiting += phase.gradients
            flow.gradients += phase.gradients
            continue
        if phase.is_backward or plan.reshards or not is_sharded:
            flow.whole.pop(number, None)
    flow.whole = {}
    if waiting:
        flow.gradients -= waiting
        yield from reduce_flat(plan, flow, 0, waiting, reduced[0] + reduced[-1], None)
    yield step(plan, profile, {"gradients": sum(reduced) / plan.shards})


def gathers_ahead(plan: Plan, profile: Profile, unit: int) -> bool:
    """Return whether FSDP1 gathers the layer before a unit during the unit's backward pass.

    Under peft what comes next is an adapter or the copy of a norm, but before a plain tail.
    """
    tail = profile.units - 1
    if not plan.prefetches:
        return False
    if not plan.args.use_peft:
        return unit > 1
    copies_norm = any(w.unit == tail and w.rows == w.numel for w in profile.trained)
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
    bucket = BUCKET * plan.itemsize if plan.stage else 0
    summed = gradients_of_zero(plan, profile)  # of earlier micro-batches
    held = summed
    in_use = 0
    for phase in profile.phases:
        before, after = phase.high, phase.late
        if not keeps_gradients:
            before, after = phase.lean, phase.late_lean
        if phase.gradients and not in_use:
            before = phase.early
        yield {"activations": before, "gradients": held, "communication": in_use}
        if phase.gradients:
            in_use = bucket
            yield {"activations": after, "gradients": held, "communication": in_use}
            if keeps_gradients and not accumulates(plan):
                held += phase.gradients
    if profile.phases[-1].is_backward:  # not in an evaluation
        yield from reduced_by_zero(plan, profile, summed)


def gradients_of_zero(plan: Plan, profile: Profile) -> float:
    """Return the bytes of gradients of earlier micro-batches that ZeRO-0 to 2 keep."""
    if not accumulates(plan):
        return 0.0
    if plan.stage < 2:
        return elements_trained(profile) * plan.itemsize
    if plan.offloads_optimizer:
        return 0.0
    if plan.low is not None:
        return elements_updated(plan, profile) * FP32
    return elements_in_part(profile, plan.ranks) * plan.itemsize


def reduced_by_zero(plan: Plan, profile: Profile, summed: float) -> Iterator[Sizes]:
    """Yield the moments of ZeRO-0 to 2 after the backward pass, and of the step.

    A bucket is reduced through a flat copy and, under mixed precision, an fp32 copy of that.
    `summed` are the bytes of gradients of earlier micro-batches.
    """
    item = plan.itemsize
    elements = elements_trained(profile)
    own = elements_updated(plan, profile)
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
    norm = min(largest_trained(profile), own) * NORM
    if plan.stage == 2 and plan.low is not None:
        yield {"gradients": fp32_copies, "communication": bucket + flat}
        yield {"gradients": fp32_copies + norm}
        yield step(plan, profile, {"gradients": fp32_copies})
        return
    part = elements_in_part(profile, plan.ranks) * item
    if plan.stage == 1:
        summed = 0.0
    yield {"gradients": summed, "communication": bucket + flat}
    yield {"gradients": summed + part, "communication": bucket}
    yield {"gradients": part + norm}
    yield step(plan, profile, {"gradients": part + own * item + fp32_copies})


def zero3(plan: Plan, profile: Profile) -> Iterator[Sizes]:
    """Yield the moments of ZeRO-3, which gathers ahead by the order of the pass before.

    Units that come next are gathered while one is computed, up to PREFETCHED elements at a time and
    MOST_LIVE in all: one in place, several through a flat buffer. They stay whole where they are
    used again within MOST_LIVE elements. Parameters up to PERSISTENT elements are always whole.
    """
    split = [w for w in profile.weights if w.numel > PERSISTENT and w.is_used]
    by_unit = [[w for w in split if w.unit == unit] for unit in range(profile.units)]
    size = [sum(w.numel * w.itemsize for w in weights) for weights in by_unit]
    elements = [sum(w.numel for w in weights) for weights in by_unit]
    order = [phase.unit for phase in profile.phases]
    if profile.is_tied:
        order = [unit or profile.units - 1 for unit in order]
    whole: dict[int, float] = {}
    # Units that are gathered through one flat buffer, and those of them that are not computed yet
    flight: list[tuple[list[int], set[int]]] = []

    def moment(activations: float, communication: float = 0) -> Sizes:
        in_flight = sum(size[unit] for units, _ in flight for unit in units)
        return {
            "activations": activations,
            "unsharded": sum(whole.values()),
            "communication": in_flight + communication,
        }

    for place, (unit, phase) in enumerate(zip(order, profile.phases, strict=True)):
        units, waiting = next((one for one in flight if unit in one[1]), ([unit], {unit}))
        if len(waiting) == len(units):  # They are copied out of the buffer once.
            whole |= {one: size[one] for one in units}
        there = set(whole).union(*(units for units, _ in flight))
        wanted = gathered_ahead(order[place + 1 :], there, elements)
        if sum(len(by_unit[one]) for one in wanted) == 1:
            whole[wanted[0]] = size[wanted[0]]
        elif wanted:
            flight.append((wanted, set(wanted)))
        yield moment(phase.lean)
        waiting.discard(unit)
        flight = [one for one in flight if one[1]]
        soon = used_within(MOST_LIVE, order[place + 1 :], elements)
        whole = {one: kept for one, kept in whole.items() if one in soon}
    own = elements_updated(plan, profile)
    yield moment(0, communication=min(elements_trained(profile), BUCKET) * FP32)
    if not plan.offloads_optimizer:
        largest = math.ceil(largest_trained(profile) / plan.ranks)
        yield step(plan, profile, {"gradients": min(own, MOST_LIVE) * FP32})
        yield {"gradients": largest * NORM}


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
