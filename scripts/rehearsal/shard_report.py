# SPDX-License-Identifier: Apache-2.0
"""Shard report: compare the bytes that each rank really holds with what the YAML promises.

`rehearsal.live_tensors` measures in every rank; `judge` and `table` compare the measurements with
the YAML and format them, without loading torch. The comparison is in elements, since mixed
precision may change the bytes per element; the table shows bytes. A 4-bit base counts as it is
stored.
"""

from dataclasses import dataclass

from config_strategy import ConfigStrategy

# The lowest ZeRO stage that splits a class. FSDP splits all of them, as stage 3 does.
SPLIT_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1, "master": 1}
CLASSES = tuple(SPLIT_FROM_STAGE)
ALL_SPLIT = 3
ALIGNMENT = 16  # elements or bytes to which an engine may pad each tensor of a flat buffer
# Classes that a key of the YAML moves to host memory
OFFLOADED = {
    "fsdp_offload_params": CLASSES,
    "offload_optimizer_device": ("optimizer", "master"),
    "offload_param_device": ("parameters",),
}
HEADER = ("rank", "class", "dtype", "device", "held bytes", "promised", "promise", "verdict")
LINE = "{:<4}  {:10}  {:8}  {:6}  {:>15}  {:>15}  {:7}  {}"


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the model before it is split; of experts that are spread, the part of a rank."""

    elements: int
    rows: int
    is_trained: bool


@dataclass(frozen=True)
class Promise:
    """Elements of one class that a rank holds: the nominal number, and bounds due to padding."""

    least: int
    nominal: int
    most: int

    def changed(self, times: int = 1, plus: int = 0) -> "Promise":
        """Return the promise for so many times the elements, and so many more."""
        bounds = (self.least, self.nominal, self.most)
        return Promise(*(times * bound + plus for bound in bounds))


def promised(
    tensors: list[WholeTensor], shards: int, place: int, by_rows: bool, whole_below: int = 0
) -> Promise:
    """What one rank may hold of these tensors.

    FSDP2 splits each tensor by rows, of which the last ranks hold less, or nothing, and pads the
    last part. The others split flat buffers, with some padding.

    Args:
        place: of the rank among those that share the tensors.
        by_rows: whether it is FSDP2.
        whole_below: ZeRO-3 also keeps tensors of up to this many elements whole
            (stage3_param_persistence_threshold).
    """
    total = sum(tensor.elements for tensor in tensors)
    if shards == 1:  # ZeRO pads its flat buffer of whole parameters too
        return Promise(total, total, total + ALIGNMENT * len(tensors))
    if not by_rows:
        whole = sum(tensor.elements for tensor in tensors if tensor.elements <= whole_below)
        nominal = divided_up(total, shards) + whole
        # FSDP1 aligns each tensor to 16 bytes, and all pad to a multiple of the number of shards
        padding = (ALIGNMENT + shards) * len(tensors)
        return Promise(nominal - padding, nominal, nominal + padding)
    least = 0
    most = 0
    for tensor in tensors:
        if not tensor.elements:
            continue
        width = tensor.elements // tensor.rows
        part = divided_up(tensor.rows, shards)
        rows_left = max(0, tensor.rows - place % shards * part)
        least += width * min(part, rows_left)
        most += width * part
    return Promise(least, most, most)


def divided_up(number: int, parts: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // parts)


def promise_of(
    name: str, measured: dict, rank: int, shards: dict[str, int], facts: ConfigStrategy
) -> Promise:
    """What the YAML promises for one class on one rank, with the exceptions of DeepSpeed."""
    tensors = [WholeTensor(*fields) for fields in measured["tensors"]]
    whole_below = 0
    if name == "parameters":
        whole_below = measured.get("persistence_threshold", 0)
    else:
        tensors = [tensor for tensor in tensors if tensor.is_trained]
    by_rows = facts.engine == "fsdp2"
    place = rank // facts.tp
    if measured["place"] is not None:  # FSDP2 shards stages, which the command line asks for.
        by_rows = True
        place = measured["place"]
    promise = promised(tensors, shards[name], place, by_rows, whole_below)
    offloads_whole = shards[name] == 1 and "offload_param_device" in facts.offload
    if name == "parameters" and offloads_whole and measured[name]["devices"] == ["cpu", "cuda"]:
        # One rank offloads whole tensors, and has a second copy of the small ones on its GPU.
        copied = sum(tensor.elements for tensor in tensors if tensor.elements <= whole_below)
        return promise.changed(plus=copied)
    if name == "gradients" and facts.stage == 2:
        # A tensor that the border of a partition splits stays whole; a rank has up to two borders.
        largest = max(tensor.elements for tensor in tensors)
        more = min(shards[name] - 1, 2) * largest
        return Promise(promise.least, promise.nominal, promise.most + more)
    if name == "optimizer":  # AdamW: 2 tensors per parameter
        return promise.changed(times=measured["state_tensors_per_parameter"])
    return promise


def judge(measurements: list[dict], facts: ConfigStrategy, ranks_per_node: int) -> list[dict]:
    """Return one row per rank and class: held and promised bytes, dtypes, devices, shards, verdict.

    Args:
        measurements: what `rehearsal.live_tensors` wrote, by rank.
        facts: the strategy that the YAML requests.
    """
    number = facts.shards_on(len(measurements), ranks_per_node)
    stage = ALL_SPLIT
    if facts.stage is not None:
        stage = facts.stage
    shards_by_yaml = {}
    for name, first in SPLIT_FROM_STAGE.items():
        shards_by_yaml[name] = number if stage >= first else 1
    # A rank may hold no parameter at all
    states = max(measured["state_tensors_per_parameter"] for measured in measurements)
    rows = []
    for rank, measured in enumerate(measurements):
        shards = shards_by_yaml
        if measured["shards"] is not None:  # of a stage
            shards = dict.fromkeys(CLASSES, measured["shards"])
        measured = measured | {"state_tensors_per_parameter": states}
        for name in CLASSES:
            if name == "master" and not measured[name]["elements"]:
                continue  # The optimizer updates the parameters themselves.
            promise = promise_of(name, measured, rank, shards, facts)
            row = {"rank": rank, "class": name}
            rows.append(row | judged(name, measured[name], promise, shards[name], facts))
    return rows


def judged(name: str, held: dict, promise: Promise, shards: int, facts: ConfigStrategy) -> dict:
    """Return the fields of a row about one class that one rank holds.

    Less than promised is no fault, since an optimizer may keep less for some weights than for
    others; only of the parameters it shows that a YAML splits what it should not.
    """
    elements = held["elements"]
    is_less = elements < promise.least
    is_held = elements <= promise.most and not (is_less and name == "parameters")
    is_in_place = True
    if any(name in OFFLOADED.get(key, ()) for key in facts.offload):
        is_in_place = held["devices"] == ["cpu"]
        if name == "parameters" and facts.engine == "zero":
            is_in_place = "cpu" in held["devices"]  # ZeRO-3 keeps small ones on the device too
    verdict = "NOT AS PROMISED"
    if is_held and is_in_place:
        verdict = "ok, less" if is_less else "ok"
    width = held["bytes"] / elements if elements else 0
    return {
        "dtypes": held["dtypes"],
        "devices": held["devices"],
        "held_bytes": held["bytes"],
        "promised_bytes": round(promise.nominal * width),
        "shards": shards * facts.tp,
        "verdict": verdict,
    }


def table(rows: list[dict]) -> str:
    """Return the rows as aligned text, bytes with thousands separators."""
    lines: list[str] = [LINE.format(*HEADER)]
    for row in rows:
        numbers = (f"{row['held_bytes']:,}", f"{row['promised_bytes']:,}")
        kinds = ("+".join(row["dtypes"]), "+".join(row["devices"]))
        promise = "whole" if row["shards"] == 1 else f"1/{row['shards']}"
        lines.append(
            LINE.format(row["rank"], row["class"], *kinds, *numbers, promise, row["verdict"])
        )
    return "\n".join(lines)
