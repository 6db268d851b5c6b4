"""Say in plain words what an accelerate config will really do, and find what is wrong with it.

    python scripts/check_config.py accelerate_configs/fsdp.yaml --num_processes 8
    python scripts/check_config.py accelerate_configs/fsdp.yaml accelerate_configs/ddp.yaml --json
    python scripts/check_config.py accelerate_configs/fsdp.yaml --recipes --fix --output runs/mended.yaml

Takes any accelerate config, with the DeepSpeed JSON it points to, or such a JSON alone. It only reads: torch and
accelerate are not loaded. The rules are in `recipes/config_rules.py`; a recipe holds the file that its launcher read
against the same ones when it starts.

error: accelerate or DeepSpeed would stop, or something else than what is written would run silently.
warning: it works, but costs or surprises. info: advice, and what only the recipes here would refuse or have not been
tested with. With --recipes the former is an error and the latter a warning, as when a recipe starts.

Exit code: 0 no error, 64 a wrong call, 65 an error in a file, and with --strict for a warning too. --fix writes the
corrected file to NAME.fixed.yaml or --output, never over FILE, and ends with the code of the corrected file. A
DeepSpeed JSON that a YAML points to is mended as a FILE of its own.
"""

import argparse
import json
import os.path
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
from accelerate_keys import COMMAND_LINE_ONLY, READ_BY_ONE_VERSION  # noqa: E402
from config_files import find_faults, load  # noqa: E402
from config_rules import OFFLOADS, STOPS, WISHES, strategy_of, strategy_run, written_in  # noqa: E402
from proof.shard_report import shards_of  # noqa: E402
from usage import Parser  # noqa: E402
from yaml_edits import comments, edit_content, edit_text  # noqa: E402

BAD_FILE = 65
FAULTS = 100  # more are left to a person
KEEPS_PARAMETERS = (
    "SHARD_GRAD_OP",
    "HYBRID_SHARD_ZERO2",
)  # gathered from the forward to the backward pass
SHARD_GRAD_OP = {
    "fsdp2": "FSDP2 fsdp_reshard_after_forward: false (fsdp2_shard_grad_op.yaml)",
    "fsdp1": "FSDP1 SHARD_GRAD_OP (fsdp1_shard_grad_op.yaml)",
}
SIBLINGS = {  # the same strategy under each engine
    "NO_SHARD": {
        "ddp": "DDP (ddp.yaml)",
        "fsdp1": "FSDP1 NO_SHARD (fsdp1_no_shard.yaml)",
        "fsdp2": "none in FSDP2",
        "zero": "ZeRO-0 (deepspeed_zero0.yaml)",
    },
    "ZeRO-1": {"fsdp": "none in FSDP"},
    "ZeRO-2": {
        "fsdp": "in FSDP only SHARD_GRAD_OP, which also splits parameters at rest (fsdp2_shard_grad_op.yaml)"
    },
    "SHARD_GRAD_OP": {
        **SHARD_GRAD_OP,
        "zero": "nearly ZeRO-2, which keeps parameters whole (deepspeed_zero2.yaml)",
    },
    "FULL_SHARD": {
        "fsdp2": "FSDP2 full shard (fsdp.yaml)",
        "fsdp1": "FSDP1 FULL_SHARD (fsdp1_full_shard.yaml)",
        "zero": "ZeRO-3 (deepspeed_zero3.yaml)",
    },
    "HYBRID_SHARD": {
        "fsdp2": "FSDP2 on a mesh (fsdp2_hybrid_shard.yaml)",
        "zero": "ZeRO++ hpZ (in a DeepSpeed JSON)",
        "fsdp1": "FSDP1 HYBRID_SHARD (fsdp1_hybrid_shard.yaml)",
    },
}


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a YAML for accelerate, or a DeepSpeed JSON"
    )
    parser.add_argument(
        "--num_processes", type=int, help="as for accelerate launch, instead of the file's"
    )
    parser.add_argument(
        "--recipes", action="store_true", help="for the recipes here: their rules count too"
    )
    parser.add_argument("--json", action="store_true", help="print a list with one object a file")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument(
        "--fix", action="store_true", help="write the corrected file beside the old one"
    )
    parser.add_argument("--output", metavar="PATH", help="with --fix and one FILE: write it here")
    return parser, parser.parse_args()


# ---- What runs ----
def explain(content, config, findings, deepspeed=None, recipes=False):
    """What a config really does, as {aspect: words}; no more than that if nothing would run.

    recipes: say it of these recipes, which reduce gradients in fp32 and under FSDP in each micro-batch, and not of
    accelerate by itself."""
    if any(item.kind == STOPS for item in findings):
        return {"runs": "nothing: accelerate or DeepSpeed stops, see below"}
    facts, strategy, machines = strategy_of(config), strategy_run(config), config["num_machines"]
    ranks = (
        max(config.get("num_processes", 1) // machines * machines, 1)
        if facts["engine"] != "single"
        else 1
    )
    names = {
        "single": "one process",
        "ddp": "DDP",
        "zero": f"DeepSpeed ZeRO-{facts['stage']}",
        "fsdp1": f"FSDP1 {strategy}",
        "fsdp2": f"FSDP2 {strategy}",
    }
    processes = f"{ranks} on {machines} machines" if machines > 1 else str(ranks)
    if ranks == 1 and facts["engine"] != "single":
        processes = "1, so that nothing is split; --num_processes N for more"
    words = {"runs": names[facts["engine"]], "processes": processes}
    words |= shares(config, facts, strategy, ranks, machines, recipes)
    words["state"] = place_of_state(config, facts)
    words["precision"] = precision(config["mixed_precision"], facts["engine"], recipes)
    if facts["engine"].startswith("fsdp"):
        default = "FULL_STATE_DICT" if facts["engine"] == "fsdp1" else "SHARDED_STATE_DICT"
        words["checkpoints"] = config["fsdp_config"].get("fsdp_state_dict_type", default)
    siblings = SIBLINGS[strategy.removesuffix("_ZERO2")]
    words["siblings"] = ", ".join(
        name for engine, name in siblings.items() if engine != facts["engine"]
    )
    unused = [
        f"{', '.join(found)} ({why})"
        for why, found in no_effect(content, config, deepspeed).items()
    ]
    words["no effect"] = "; ".join(unused) or "none of the keys"
    return words


def shares(config, facts, strategy, ranks, machines, recipes):
    """What each process holds of parameters, gradients and optimizer state, in words."""
    several = ranks if ranks > 1 else 2  # for one process: what N would hold
    words = {}
    for name, parts in shards_of(facts, several, several // machines).items():
        count = parts if ranks > 1 else "N"
        words[name] = f"1/{count} on each process" if parts > 1 else "whole on each process"
    if words["parameters"].startswith("1/"):
        policy = "" if facts["engine"] == "zero" else config["fsdp_config"]["fsdp_auto_wrap_policy"]
        unit = {"NO_WRAP": "all at once", "SIZE_BASED_WRAP": "unit by unit"}.get(
            policy, "layer by layer"
        )
        words["parameters"] += f"; gathered {unit} " + (
            "in the forward pass and kept until the backward pass is done"
            if strategy in KEEPS_PARAMETERS
            else "for the forward and again for the backward pass, freed after each"
        )
        words["parameters"] += "; small tensors whole" if facts["engine"] == "zero" else ""
    if words["gradients"].startswith("1/") and facts["engine"] != "zero":
        when = "reduced in each of" if recipes else "whole between"
        words["gradients"] += f"; {when} the micro-batches of an accumulation"
    if words["optimizer"].startswith("1/") and strategy == "ZeRO-1":
        words["gradients"] += "; for the step each keeps its own share"
    del words["master"]
    return words


def place_of_state(config, facts):
    """Where parameters, gradients and optimizer state live, in words."""
    if facts["engine"].startswith("fsdp") and config["fsdp_config"].get("fsdp_offload_params"):
        return "in host memory, all of it; the optimizer steps on the CPU"
    names = {"offload_optimizer": "optimizer state and step", "offload_param": "parameters"}
    devices = {key: config["deepspeed_config"][f"{key}_device"] for key in names}
    moved = [
        f"{names[key]} on {devices[key]}"
        for key, least in OFFLOADS.items()
        if (facts["stage"] or 0) >= least and devices[key] != "none"
    ]
    return f"{', '.join(moved)}; the rest on the GPU" if moved else "on the GPU"


def precision(kind, engine, recipes):
    """What is computed and kept in which type, in words."""
    if kind == "no":
        return "not mixed: all in the type of the weights as loaded"
    if engine == "zero":
        reduced = "; gradients are reduced in fp32" if recipes else ""
        return f"{kind} weights, gradients and computation; fp32 master weights in the optimizer{reduced}"
    if engine.startswith("fsdp"):
        does = (
            f"computes in {kind}, reduces gradients in fp32"
            if recipes
            else f"computes and communicates in {kind}"
        )
        return f"{does}; trained weights, gradients and optimizer state rest in fp32"
    return f"computes in {kind} (autocast); weights, gradients and optimizer in the type of the weights as loaded"


def no_effect(content, config, deepspeed=None):
    """The written keys that change nothing in this run, as {reason: [keys]}."""
    engine, fsdp, zero = (
        config["distributed_type"],
        written_in(content, "fsdp_config"),
        config["deepspeed_config"],
    )
    version, policy = (
        config["fsdp_config"]["fsdp_version"],
        config["fsdp_config"]["fsdp_auto_wrap_policy"],
    )
    tpu = [
        key
        for key in content
        if str(key).startswith(("tpu_", "command")) or key == "main_training_function"
    ]
    wraps = {
        "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
        "fsdp_min_num_params": "SIZE_BASED_WRAP",
    }
    third = [key for key in ("zero3_init_flag", "zero3_save_16bit_model") if key in zero]
    third += [
        key for key in (deepspeed or {}).get("zero_optimization", {}) if key.startswith("stage3_")
    ]
    reasons = {
        "taken from the command line alone": [key for key in COMMAND_LINE_ONLY if key in content],
        "for TPUs": [key for key in tpu if engine != "XLA" and key not in COMMAND_LINE_ONLY],
        "for several machines": [
            key for key in ("machine_rank", "main_process_ip") if key in content
        ]
        if config["num_machines"] == 1
        else [],
        "for a CPU run": ["use_cpu"]
        if "use_cpu" in content and engine not in ("NO", "MULTI_CPU")
        else [],
        "for fp8": ["fp8_config"]
        if "fp8_config" in content and config["mixed_precision"] != "fp8"
        else [],
        f"for FSDP{3 - version}": [
            key for key in fsdp if READ_BY_ONE_VERSION.get(key, version) != version
        ],
        "for another wrap policy": [key for key in wraps if key in fsdp and policy != wraps[key]],
        "for ZeRO-3": third if engine == "DEEPSPEED" and zero["zero_stage"] != 3 else [],
        "transformers' models do not use it": [
            key for key in deepspeed or {} if key == "activation_checkpointing"
        ],
    }
    return {reason: found for reason, found in reasons.items() if found}


# ---- Files ----
def check_file(file, ranks=None, recipes=False):
    """The findings on a file, worst first, and in words what it does."""
    findings, config = find_faults(file, ranks, recipes)
    content = file.content
    if file.deepspeed is file:
        content = {"deepspeed_config": {}}
    return findings, explain(
        content, config, findings, file.deepspeed and file.deepspeed.content, recipes
    )


def is_possible(edit, content):
    """Whether an edit writes over nothing but its key: a section may hold something else, which a person wrote."""
    for key in edit[1][:-1]:
        content = content.get(key, {}) if isinstance(content, dict) else content
    return isinstance(content, dict | None)


def mend(file, ranks=None, recipes=False):
    """Make the edits of one finding after the other. Returns the mended file, what was mended and what is left."""
    mended = []
    while True:
        findings = [
            item for item in find_faults(file, ranks, recipes)[0] if item.severity != "info"
        ]
        todo = [
            item
            for item in findings
            if item.edits
            and (file.deepspeed is file or not item.in_json)
            and all(is_possible(edit, file.content) for edit in item.edits)
        ]
        if not todo or max(len(mended), len(findings)) > FAULTS:
            return file, mended, findings
        names = [item for item in todo if [action for action, *_ in item.edits] == ["rename"]]
        chosen = (names or todo)[0]  # names first: the other edits go by full ones
        for edit in chosen.edits:
            content = edit_content(file.content, edit)
            as_json = file.path.suffix == ".json"
            text = json.dumps(content, indent=2) + "\n" if as_json else edit_text(file.text, edit)
            alone = file.deepspeed is file
            file = replace(file, text=text, content=content)
            file.deepspeed = file if alone else file.deepspeed
        mended.append(chosen)


def as_object(item, file):
    """A finding as a dict, with its file and line."""
    file = file.deepspeed if item.in_json else file
    return {
        "severity": item.severity,
        "kind": item.kind,
        "file": str(file.path),
        "line": file.line_of(item.path),
        "key": ".".join(map(str, item.path)),
        "reason": item.reason,
        "fix": item.fix,
        "mendable": bool(item.edits),
    }


def report_on(path, args):
    """All that is to be said about a file, as a dict; with --fix the corrected file is written."""
    try:
        file = load(path)
    except ValueError as error:
        broken = {
            "severity": "error",
            "kind": STOPS,
            "file": path,
            "line": None,
            "key": "file",
            "reason": str(error),
        }
        return {"file": path, "does": {}, "findings": [{**broken, "fix": "", "mendable": False}]}
    findings, words = check_file(file, args.num_processes, args.recipes)
    if not args.fix:
        return {
            "file": path,
            "does": words,
            "findings": [as_object(item, file) for item in findings],
        }
    fixed, mended, left = mend(file, args.num_processes, args.recipes)
    target = Path(args.output or file.path.with_suffix(f".fixed{file.path.suffix}"))
    if mended:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fixed.text, encoding="utf-8")
    words = check_file(fixed, args.num_processes, args.recipes)[1]
    before, after = (
        [] if file.path.suffix == ".json" else comments(text) for text in (file.text, fixed.text)
    )
    return {
        "file": path,
        "written": str(target) if mended else None,
        "does": words,
        "comments_lost": list((Counter(before) - Counter(after)).elements()),
        "mended": [as_object(item, file) for item in mended],
        "findings": [as_object(item, fixed) for item in left],
    }


def show(report):
    """Print a report: what the file does, what was mended, and the findings as FILE:LINE: severity: key: reason."""
    print(report.get("written") or report["file"])
    print("".join(f"  {aspect:<12} {words}\n" for aspect, words in report["does"].items()), end="")
    mended = [(item, "mended") for item in report.get("mended", [])]
    for item, label in [*mended, *((item, item["severity"]) for item in report["findings"])]:
        place = f"{item['file']}:{item['line']}" if item["line"] else item["file"]
        print(f"{place}: {label}: {item['key']}: {item['reason']}")
        if item["fix"]:
            way_out = "for the recipes" if item["kind"] in WISHES and label == "info" else "fix"
            print(f"    {'now' if label == 'mended' else way_out}: {item['fix']}")
    if report.get("comments_lost"):
        print(f"{report['written']}: comments lost: {'  '.join(report['comments_lost'])}")


def main():
    parser, args = parse_args()
    if args.output and (not args.fix or len(args.files) > 1):
        parser.error("--output goes with --fix and one FILE")
    if args.num_processes is not None and args.num_processes < 1:
        parser.error("--num_processes must be at least 1")
    for path in args.files:
        if not os.path.isfile(path):
            parser.error(f"{path} is no file")
        if args.output and Path(args.output).exists() and Path(args.output).samefile(path):
            parser.error(f"--output is {path} itself")
    sys.stdout.reconfigure(errors="backslashreplace")
    reports = [report_on(path, args) for path in args.files]
    if args.json:
        print(json.dumps(reports, indent=2))
    for report in [] if args.json else reports:
        show(report)
    refused = ("error", "warning") if args.strict else ("error",)
    bad = any(item["severity"] in refused for report in reports for item in report["findings"])
    sys.exit(BAD_FILE if bad else 0)


if __name__ == "__main__":
    main()
