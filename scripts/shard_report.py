"""Shard proof: the bytes each rank really holds against what the accelerate YAML promises.

Two halves. In every rank `watch` measures live tensors at the first optimizer step: gradients just before it,
parameters and optimizer state just after it, each storage counted once. In `scripts/rehearse.py` `judge` and `table`
compare them with the YAML and print; they load no torch.

Whole tensors come from the model as it was handed to `Accelerator.prepare`. Comparison is in elements, since mixed
precision may change the bytes per element on the way; the table shows bytes. A 4-bit base counts as stored.
"""

import functools
import json
import math
from pathlib import Path

CLASSES = ("parameters", "gradients", "optimizer", "master")


def describe(model):
    """(elements, rows, trainable) of each tensor of the unprepared model, tied ones once; ZeRO-3 keeps ds_shape."""
    shapes = [(getattr(p, "ds_shape", p.shape), p.requires_grad) for p in model.parameters()]
    return [(math.prod(shape), shape[0] if shape else 1, trainable) for shape, trainable in shapes]


def held(tensors):
    """Elements, bytes, dtypes and devices of the distinct storages behind local tensors or DTensors."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.detach().untyped_storage()
        if storage.nbytes():
            storages[str(storage.device), storage.data_ptr()] = (storage.nbytes(), local)
    return {
        "elements": sum(size // local.element_size() for size, local in storages.values()),
        "bytes": sum(size for size, _ in storages.values()),
        "dtypes": sorted(
            {str(local.dtype).removeprefix("torch.") for _, local in storages.values()}
        ),
        "devices": sorted({local.device.type for _, local in storages.values()}),
    }


def live_parameters(model):
    """Parameters at rest; under ZeRO-3 the shard (ds_tensor) and, for small tensors, the whole one besides."""
    parameters = list(model.parameters())
    return parameters + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]


def live_gradients(model, optimizer):
    """Gradients before the step: on the parameters or, under ZeRO, in the partitions of its optimizer."""
    gradients = [g for p in model.parameters() for g in (p.grad, getattr(p, "grad_accum", None))]
    for group in getattr(optimizer, "averaged_gradients", {}).values():  # DeepSpeed ZeRO 1-3
        gradients += group or []
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
    ):
        gradients += [
            partition.grad for partition in getattr(optimizer, name, [])
        ]  # with offload they lie here
    return [g for g in gradients if g is not None]


def live_state(base, model):
    """Optimizer state of its parameter's size, tensors of it per parameter, master weights apart from the model."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters() if not hasattr(p, "to_local")}
    state, per_parameter, master = [], 0, []
    for parameter, entries in base.state.items():
        like = [
            v
            for k, v in entries.items()
            if k != "step" and getattr(v, "shape", None) == parameter.shape
        ]
        state, per_parameter = state + like, max(per_parameter, len(like))
        if not hasattr(parameter, "to_local") and parameter.untyped_storage().data_ptr() not in own:
            master.append(parameter)
    return state, per_parameter, master


def watch(path):
    """Let the first optimizer step of the recipe write a measurement to `path`."""
    when_prepared(lambda *prepared: measure_at_first_step(*prepared, path))


def when_prepared(action):
    """Wrap `Accelerator.prepare` so that action(model, optimizer, describe(model)) is called once."""
    from accelerate import Accelerator
    from torch.nn import Module
    from torch.optim import Optimizer

    prepare, seen = Accelerator.prepare, {}

    @functools.wraps(prepare)
    def prepare_and_watch(self, *args, **kwargs):
        for module in (
            a
            for a in args
            if isinstance(a, Module) and any(p.requires_grad for p in a.parameters())
        ):
            seen["tensors"] = describe(module)
        result = prepare(self, *args, **kwargs)
        for prepared in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(prepared, Module) and "tensors" in seen:
                seen.setdefault("model", prepared)
            elif isinstance(prepared, Optimizer):
                seen.setdefault("optimizer", prepared)
        if "model" in seen and "optimizer" in seen and "watched" not in seen:
            seen["watched"] = True
            action(seen["model"], seen["optimizer"], seen["tensors"])
        return result

    Accelerator.prepare = prepare_and_watch


def around_steps(model, optimizer, before, after):
    """Call before(zero, base) and after(zero, base) around each optimizer step.

    zero: DeepSpeed's optimizer or None; base: torch's. DeepSpeed's engine is hooked as a whole, since its `step` also
    moves gradients and casts parameters."""
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    base = zero or optimizer
    while hasattr(base, "optimizer"):
        base = base.optimizer
    if zero is None:
        base.register_step_pre_hook(lambda *_: before(zero, base))
        base.register_step_post_hook(lambda *_: after(zero, base))
        return
    step = model.step

    def step_and_tell(*args, **kwargs):
        before(zero, base)
        step(*args, **kwargs)
        after(zero, base)

    model.step = step_and_tell


def measure_at_first_step(model, optimizer, tensors, path):
    """Write what is held around the first step that the optimizer takes."""
    found = {}

    def before(zero, base):
        if "parameters" not in found:
            found["gradients"] = held(live_gradients(model, zero))

    def after(zero, base):
        if "parameters" in found or not base.state:  # fp16 may skip the first steps
            return
        state, per_parameter, master = live_state(base, model)
        found.update(
            parameters=held(live_parameters(model)), optimizer=held(state), master=held(master)
        )
        found.update(tensors=tensors, state_tensors_per_parameter=per_parameter)
        if zero is not None:
            found["persistence_threshold"] = model.zero_param_persistence_threshold()
        Path(path).write_text(json.dumps(found))

    around_steps(model, optimizer, before, after)


def shards_of(facts, ranks, ranks_per_node):
    """Into how many shards the YAML splits each class: {class: N}, 1 for whole."""
    n = {"HYBRID_SHARD": ranks_per_node, "NO_SHARD": 1}.get(
        facts["strategy"], facts["shards"] or ranks
    )
    if facts["engine"] in ("single", "ddp"):
        n = 1
    stage = (
        facts["stage"] if facts["engine"] == "zero" else 3
    )  # FSDP splits parameters at rest in every sharded mode
    return {c: n if stage >= needed else 1 for c, needed in zip(CLASSES, (3, 2, 1, 1), strict=True)}


def promised(tensors, n, by_rows, rank, whole_below):
    """(least, nominal, most) elements of one rank for n shards of each (elements, rows) tensor.

    FSDP2 cuts each tensor by rows and pads the last part. The others cut flat buffers with some padding, and ZeRO-3
    keeps tensors of up to `whole_below` elements whole besides their shards (stage3_param_persistence_threshold).
    """
    total = sum(size for size, _ in tensors)
    if n == 1:
        return (
            total,
            total,
            total + 16 * len(tensors),
        )  # ZeRO pads its flat buffer of whole parameters too
    if by_rows:
        parts = [(size // rows, rows, -(-rows // n)) for size, rows in tensors if size]
        most = sum(width * part for width, _, part in parts)
        return (
            sum(width * max(0, min(part, rows - rank % n * part)) for width, rows, part in parts),
            most,
            most,
        )
    nominal = -(-total // n) + sum(size for size, _ in tensors if size <= whole_below)
    padding = (16 + n) * len(
        tensors
    )  # FSDP1 aligns each tensor to 16 bytes, all pad to a multiple of n
    return nominal - padding, nominal, nominal + padding


def promise_of(name, measured, rank, shards, facts):
    """(least, nominal, most) elements of one class on one rank, with what DeepSpeed documents for gradients."""
    tensors = [
        (size, rows) for size, rows, trains in measured["tensors"] if trains or name == "parameters"
    ]
    whole_below = measured.get("persistence_threshold", 0) if name == "parameters" else 0
    least, nominal, most = promised(
        tensors, shards[name], facts["engine"] == "fsdp2", rank, whole_below
    )
    if (
        name == "gradients" and facts["stage"] == 1
    ):  # whole between micro-batches, its own share is left at the step
        least = promised(tensors, shards["optimizer"], False, rank, 0)[0]
    if (
        name == "gradients" and facts["stage"] == 2
    ):  # a tensor cut by the border of a partition stays whole
        most += min(shards[name] - 1, 2) * max(size for size, _ in tensors)
    return least, nominal, most


def in_its_place(name, devices, facts):
    """Whether a class lies in host memory if the YAML offloads it; ZeRO-3 keeps small parameters on the device too."""
    moved = {
        "fsdp_offload_params": CLASSES,
        "offload_optimizer_device": ("optimizer", "master"),
        "offload_param_device": ("parameters",),
    }
    if not any(name in moved[key] for key in facts["offload"] if key in moved):
        return True
    return (
        devices == ["cpu"]
        or name == "parameters"
        and facts["engine"] == "zero"
        and "cpu" in devices
    )


def judge(measurements, facts, ranks_per_node):
    """One row per rank and class: held, promised and whole bytes, dtypes, devices, shards, verdict."""
    shards, rows = shards_of(facts, len(measurements), ranks_per_node), []
    states = max(measured["state_tensors_per_parameter"] for measured in measurements)  # AdamW: 2
    for rank, measured in enumerate(measurements):
        for name in CLASSES:
            elements, size = measured[name]["elements"], measured[name]["bytes"]
            if name == "master" and not elements:
                continue  # the optimizer steps on the parameters themselves
            least, nominal, most = promise_of(name, measured, rank, shards, facts)
            count = states if name == "optimizer" else 1
            ok = least * count <= elements <= most * count and in_its_place(
                name, measured[name]["devices"], facts
            )
            width = size / elements if elements else 0
            rows.append(
                {
                    "rank": rank,
                    "class": name,
                    "dtypes": measured[name]["dtypes"],
                    "devices": measured[name]["devices"],
                    "held_bytes": size,
                    "promised_bytes": round(nominal * count * width),
                    "shards": shards[name],
                    "verdict": "ok" if ok else "NOT AS PROMISED",
                }
            )
    return rows


def table(rows):
    """The rows as aligned text, bytes with thousands separators."""
    lines = [("rank", "class", "dtype", "device", "held bytes", "promised", "promise", "verdict")]
    for row in rows:
        promise = "whole" if row["shards"] == 1 else f"1/{row['shards']}"
        lines.append(
            (
                str(row["rank"]),
                row["class"],
                "+".join(row["dtypes"]),
                "+".join(row["devices"]),
                f"{row['held_bytes']:,}",
                f"{row['promised_bytes']:,}",
                promise,
                row["verdict"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = "<<<<>><<"  # numbers to the right
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(aligned, widths, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)
