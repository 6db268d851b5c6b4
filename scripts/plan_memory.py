r"""Will it fit? The peak memory of a training run, by what holds it, before anything is loaded.

    python scripts/plan_memory.py --config_file accelerate_configs/fsdp.yaml --num_processes 8 recipes/llama.py \
        --model_name_or_path meta-llama/Llama-3.1-8B --max_length 4096 --gradient_checkpointing --gpu h200
    python scripts/plan_memory.py meta-llama/Llama-3.1-8B --config_file accelerate_configs/ddp.yaml --use_peft
    python scripts/plan_memory.py config.json --gpu 24GB --num_gpus 4   # without a config: which ones fit, the
    fastest first

A launch command becomes its plan with `python scripts/plan_memory.py` for `accelerate launch`. Instead of the recipe
a model may stand there: a hub id, a folder or a config.json. All else are the recipe's own arguments. No weights are
loaded.

Counted is one optimizer step at its worst: rows of --max_length, all of their tokens learnt (--longest and
--learnt_share say otherwise). --simulate traces the real model on fake tensors and fake ranks instead of counting op
by op. How far both are off: README, "Will it fit?".

Exit codes: 0 planned; 1 with --gpu: does not fit; 64 usage; 69 no hub; 73 cannot write.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
from components.config_files import find_faults, load  # noqa: E402
from components.config_findings import IGNORED, STOPS  # noqa: E402
from components.config_reading import as_read  # noqa: E402
from usage import Parser  # noqa: E402

DOES_NOT_FIT, CANNOT_WRITE = 1, 73
LAUNCHER = (
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--main_training_function",
    "--gpu_ids",
    "--rdzv_backend",
    "--deepspeed_hostfile",
    "--num_cpu_threads_per_process",
)  # of accelerate launch, each with a value that changes no byte


def parse_args():
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [options] MODEL|recipes/llama.py [the recipe's own arguments]",
    )
    parser.add_argument(
        "--config_file", help="a YAML of accelerate_configs/, or another one; none: choose"
    )
    parser.add_argument(
        "--num_processes", "--num_gpus", type=int, help="ranks, one a GPU [the YAML's]"
    )
    parser.add_argument(
        "--num_machines", type=int, help="hosts with as many GPUs each [the YAML's]"
    )
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], help="instead of the YAML's"
    )
    parser.add_argument(
        "--gpu",
        help="the card: h200, a100, 4090, ..., or its memory: 24GB, 80GiB [none; pieces "
        "of the loss as on 80GiB]",
    )
    parser.add_argument(
        "--longest", type=int, help="tokens of the longest row, if that is less than --max_length"
    )
    parser.add_argument(
        "--learnt_share",
        type=float,
        default=1.0,
        help="of the tokens, for the logits [%(default)s]",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="trace the real model on fake tensors: one process, DDP, FSDP2",
    )
    parser.add_argument(
        "--plot",
        metavar="PATH.png",
        help="draw every strategy against the card, and the peak against the length",
    )
    parser.add_argument(
        "--json", metavar="PATH.json", help="write the plan here, - for the terminal"
    )
    args, rest = parser.parse_known_args()
    for flag in LAUNCHER:
        while flag in rest:
            del rest[rest.index(flag) : rest.index(flag) + 2]
    rest = [word for word in rest if word not in ("--multi_gpu", "--quiet")]
    if not rest or rest[0].startswith("--"):
        parser.error(
            "which model? MODEL, or recipes/llama.py, stands before the recipe's own arguments"
        )
    args.model, args.words = rest[0], rest[1:]
    return parser, args, rest[1:]


def recipe_arguments(parser, args, rest):
    """The recipe's own arguments, parsed by the recipe; the model among them."""
    import llama
    from memory_cards import bytes_of, pieces_on

    recipe = args.model.endswith(".py")
    if recipe and Path(args.model).name != "llama.py":
        parser.error(
            f"{args.model}: plans are for recipes/llama.py, or any decoder: give the model instead"
        )
    if not recipe and "--model_name_or_path" in rest:
        parser.error(
            "--model_name_or_path: MODEL says it already; or give recipes/llama.py instead of MODEL"
        )
    llama.fault_tolerance.RUN["output_dir"] = (
        None  # a wrong argument is no end of the run in that folder
    )
    sys.argv = ["llama.py", *rest, *([] if recipe else ["--model_name_or_path", args.model])]
    found = llama.parse_args()
    if found.max_logits_mib is None:  # what the recipe would take on this card
        found.max_logits_mib = pieces_on(bytes_of(args.gpu) or 80 * 2**30)
    return found


def read_config(parser, path):
    """The YAML as accelerate reads it; ends where accelerate would stop, or run something else than what is
    written."""
    try:
        file = load(path)
    except ValueError as error:
        parser.error(str(error))
    wrong = [
        f"{'.'.join(map(str, item.path))}: {item.reason}"
        for item in find_faults(file)[0]
        if item.kind in (STOPS, IGNORED)
    ]
    if wrong:
        parser.error(
            f"{path} would not do what it says: {wrong[0]}; see python scripts/check_config.py {path}"
        )
    return as_read(file.content, file.deepspeed and file.deepspeed.content)


def batch_of(recipe_args, args):
    """The largest micro-batch of the arguments."""
    from memory_plan import Batch

    length = min(args.longest or recipe_args.max_length, recipe_args.max_length)
    lines = recipe_args.per_device_train_batch_size
    return Batch(
        lines,
        length,
        max(round(lines * length * args.learnt_share), 1),
        recipe_args.packing or recipe_args.padding_free,
    )


def show(report):
    """The plan as text: GiB of the device by what holds them, host, verdict."""
    lines = [f"{report['title']}, {report['method']}, GiB"]
    for name, size in report["device"].items():
        lines.append(f"  {name:<16}{size / 2**30:10.3f}")
    lines.append(f"  {'peak of a GPU':<16}{report['peak'] / 2**30:10.3f} GiB")
    if report["host"]:
        lines.append(
            f"  {'host, a rank':<16}{sum(report['host'].values()) / 2**30:10.3f} GiB: {', '.join(report['host'])}"
        )
    if "card" in report:
        free = report["card"] - report["peak"]
        verdict = (
            f"fits, {free / 2**30:.1f} GiB are left"
            if free >= 0
            else f"does not fit: {-free / 2**30:.1f} GiB too many"
        )
        lines.append(f"  {'card':<16}{report['card'] / 2**30:10.3f} GiB: {verdict}")
    return "\n".join(lines)


def write_json(path, report):
    """Write to a file, to the terminal for "-", nowhere for None; ends with 73 where it cannot be written."""
    text = json.dumps(report, indent=2) + "\n"
    try:
        print(text, end="") if path == "-" else path and Path(path).write_text(text)
    except OSError as error:
        stop(path, error)


def stop(path, error):
    print(f"plan_memory.py: cannot write {path}: {error}", file=sys.stderr)
    sys.exit(CANNOT_WRITE)


def plot(parser, args, recipe_args, model, batch, card):
    """Draw all strategies for the ranks that the plan is for."""
    import memory_plot

    config = read_config(parser, args.config_file) if args.config_file else {}
    ranks = args.num_processes or config.get("num_processes") or 1
    found = memory_plot.plans(recipe_args, args, ranks, lambda path: as_read(load(path).content))
    if not found:
        parser.error("--plot: no strategy takes these arguments")
    title = f"{recipe_args.model_name_or_path}, {ranks} GPUs, {batch.lines} x {batch.tokens} tokens each"
    try:
        memory_plot.draw(args.plot, title, found, model, batch, card)
    except (OSError, ValueError) as error:
        stop(args.plot, error)


def main():
    parser, args, rest = parse_args()
    sys.path.insert(0, str(ROOT / "recipes"))
    if not 0 < args.learnt_share <= 1:
        parser.error(f"--learnt_share {args.learnt_share}: must be above 0 and at most 1")
    if args.longest is not None and args.longest < 1:
        parser.error(f"--longest {args.longest}: must be 1 or more")
    if args.longest is not None and "--packing" in rest:
        parser.error("--longest: packed lines are filled to --max_length")
    if not args.config_file and not args.gpu:
        parser.error(
            "give --config_file, for the plan of one strategy, or --gpu, to choose among all"
        )
    config = read_config(parser, args.config_file) if args.config_file else None
    from memory_cards import bytes_of, constants_of
    from memory_plan import closed_form, plan_of
    from model_shapes import Unplannable
    from model_shapes import read_config as read_model

    try:
        recipe_args = recipe_arguments(parser, args, rest)
        card, model = bytes_of(args.gpu), read_model(recipe_args.model_name_or_path)
        batch = batch_of(recipe_args, args)
        if args.plot:
            plot(parser, args, recipe_args, model, batch, card)
        if config is None:
            import memory_choice

            return memory_choice.report(args, recipe_args, model, batch, card)
        plan = plan_of(
            recipe_args, config, args.num_processes, args.num_machines, args.mixed_precision
        )
        if args.simulate:
            from memory_trace import simulate

            device, host = simulate(plan, model, batch), {}
        else:
            device, host = closed_form(plan, model, batch)
    except Unplannable as error:
        print(f"plan_memory.py: {error}", file=sys.stderr)
        return error.code
    device = {name: size for name, size in (device | constants_of(plan, device)).items() if size}
    report = {
        "title": f"{recipe_args.model_name_or_path} under {plan.name}, {plan.ranks} x GPU, "
        f"mixed precision {plan.mixed_precision}: {batch.lines} x {batch.tokens} tokens a rank",
        "method": "traced" if args.simulate else "closed form",
        "device": device,
        "peak": sum(device.values()),
        "host": host,
    }
    if card:
        report["card"] = card
    write_json(args.json, report)
    if args.json != "-":
        print(show(report))
    return DOES_NOT_FIT if card and report["peak"] > card else 0


if __name__ == "__main__":
    sys.exit(main())
