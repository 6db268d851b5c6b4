"""Rehearse a recipe under a production YAML on CPU ranks, and prove that the YAML does what it says.

    python scripts/rehearse.py --config_file accelerate_configs/fsdp.yaml recipes/llama.py --max_steps 3 ...
    python scripts/rehearse.py --config_file accelerate_configs/fsdp1_hybrid_shard.yaml --num_processes 4 ...
    python scripts/rehearse.py --config_file accelerate_configs/fsdp.yaml --device cuda --num_processes 8 ...
    python scripts/rehearse.py --warm --config_file accelerate_configs/fsdp.yaml recipes/llama.py --max_steps 3 ...

With --warm the libraries are imported once for all rehearsals of half an hour, by scripts/warm.py: the second one
takes seconds less for each of its processes.

The recipe and the YAML are used as they are, through `accelerate launch`. accelerate ignores FSDP and DeepSpeed on
a machine without an accelerator, so every rank starts through `scripts/cpu_ranks.py`, which bridges that. What has to
differ from production is printed first. Afterwards the shard report compares the bytes of parameters, gradients and
optimizer state that each rank really held with what the YAML promises (`scripts/shard_report.py`).

Exit code: that of the recipe when all ranks agree on it (0 done, 70 not finite, 73 cannot write, 75 stopped and saved)
or one of them refuses (64 usage, 65 data, 69 no hub), 70 also if the recipe succeeded but the report says NOT AS
PROMISED, else 1. 64 also for a wrong call of this tool.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import warm  # noqa: E402
from components.config_files import find_faults, load  # noqa: E402
from components.config_findings import IGNORED, STOPS  # noqa: E402
from components.config_reading import as_read  # noqa: E402
from components.config_strategy import strategy_of  # noqa: E402
from shard_report import judge, table  # noqa: E402
from usage import Parser  # noqa: E402

CLEAN_EXITS = (0, 64, 65, 69, 70, 73, 75)
REFUSALS = (64, 65, 69)  # usage, data, no hub: one rank's word is enough
FAILED, NOT_AS_PROMISED = 1, 70


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_file", required=True, help="a YAML of accelerate_configs/")
    parser.add_argument(
        "--num_processes", type=int, help="ranks to start (CPU: 2, or what the mesh needs)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda if there is one",
    )
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], help="instead of the YAML's (CPU: no)"
    )
    parser.add_argument(
        "--ranks_per_node", type=int, help="CPU: size of a simulated node (default: half the ranks)"
    )
    parser.add_argument("--report", metavar="PATH.json", help="write the shard report here")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="start processes that have imported the libraries before",
    )
    parser.add_argument("--main_process_port", type=int, help="default: 0, a free one")
    parser.add_argument(
        "recipe", metavar="RECIPE.py", help="the script to run; everything behind it is its own"
    )
    parser.add_argument("recipe_args", nargs=argparse.REMAINDER, metavar="...")
    return parser, parser.parse_args()


def find_device(device):
    """cpu or cuda; auto asks torch."""
    if device == "auto":
        import torch  # only here: it takes seconds to load

        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def read_config(parser, path):
    """The YAML as accelerate reads it; stops if accelerate would stop, or run something else than what is written."""
    try:
        file = load(path)
    except ValueError as error:
        parser.error(str(error))
    if "distributed_type" not in file.content:
        parser.error(f"{path} is not an accelerate config: it has no distributed_type")
    wrong = [
        f"  {'.'.join(map(str, item.path))}: {item.reason}; fix: {item.fix}"
        for item in find_faults(file)[0]
        if item.kind in (STOPS, IGNORED)
    ]
    if wrong:
        parser.error("\n".join([f"{path} would not do what it says:", *wrong]))
    return as_read(file.content, file.deepspeed and file.deepspeed.content)


def choose_ranks(parser, args, config, facts, device):
    """Number of ranks and ranks of a node; stops if the YAML's mesh or sharding cannot be had with them."""
    mesh, hybrid = facts["replicas"] * facts["shards"], facts["strategy"] == "HYBRID_SHARD"
    default = config.get("num_processes", 1)
    if device == "cpu":
        default = mesh or (4 if hybrid else 1 if facts["engine"] == "single" else 2)
    ranks = args.num_processes or default
    ranks_per_node = (args.ranks_per_node or ranks // 2) if device == "cpu" else ranks
    if facts["engine"] == "single" and ranks != 1:
        parser.error(
            f"{args.config_file} is for one process; --num_processes {ranks} cannot be had"
        )
    if mesh and ranks != mesh:
        parser.error(
            f"the mesh of {args.config_file} is {facts['replicas']} x {facts['shards']}: it needs {mesh} "
            f"processes, not {ranks}"
        )
    if device == "cpu" and facts["engine"] != "single" and ranks < 2:
        parser.error(
            f"{args.config_file} needs at least 2 ranks to shard or replicate, not {ranks}"
        )
    if (
        device == "cpu"
        and hybrid
        and (ranks_per_node < 2 or ranks % ranks_per_node or ranks == ranks_per_node)
    ):
        parser.error(
            f"HYBRID_SHARD needs 2 or more nodes of 2 or more ranks, not {ranks} ranks with {ranks_per_node} "
            "per node: with 1 per node torch neither shards nor averages gradients"
        )
    return ranks, ranks_per_node


def find_overrides(args, config, facts, device, ranks):
    """Settings that differ from the YAML, as (option of accelerate launch, value in force, new value, reason)."""
    overrides = []
    asked = f"{config.get('num_processes', 1)}"
    if str(ranks) != asked:
        why = "asked for" if args.num_processes else "one rank would show nothing"
        overrides.append(("num_processes", asked, str(ranks), why))
    if config.get("num_machines", 1) > 1:
        overrides.append(("num_machines", str(config["num_machines"]), "1", "all ranks run here"))
        overrides.append(
            ("machine_rank", str(config.get("machine_rank", 0)), "0", "all ranks run here")
        )
    asked = config.get("mixed_precision", "no")
    in_json = "deepspeed_config_file" in config.get(
        "deepspeed_config", {}
    )  # where the launcher cannot change it
    precision = args.mixed_precision or ("no" if device == "cpu" and not in_json else asked)
    if precision != asked:
        slow = "slow on CPU; --mixed_precision bf16 also shows what bf16 refuses"
        why = "asked for" if args.mixed_precision else slow
        overrides.append(("mixed_precision", asked, precision, why))
    return overrides


def find_notes(facts, ranks_per_node):
    """What CPU ranks cannot show, or show in another way; one sentence each."""
    notes = []
    if facts["strategy"] == "HYBRID_SHARD":
        notes.append(
            f"nodes are simulated, {ranks_per_node} ranks each: FSDP1 shards over the devices of a node"
        )
    if facts["offload"]:
        notes.append(
            f"{', '.join(facts['offload'])}: on CPU ranks all tensors are in host memory anyway"
        )
    if facts["engine"] == "zero":
        notes.append(
            "collectives go through gloo: DeepSpeed's own shared-memory op would have to be compiled"
        )
    if facts["engine"] == "zero" and facts["offload"]:
        notes.append("torch's AdamW instead of DeepSpeedCPUAdam, which would have to be compiled")
    if facts["engine"] == "fsdp1":
        notes.append(
            "full state dicts are cloned, not offloaded: on CPU upstream would hand out freed memory"
        )
    return notes


def launch(command, environment, folder):
    """Run the launcher and return its code. The first SIGINT or SIGTERM goes to the ranks, so that the recipe can
    stop and save; a second one kills them. A rank that refuses ends them all, without the launcher's trace."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    received = []

    def send(number, *pids):
        for pid in [*pids, *(int(path.read_text()) for path in folder.glob("pid.*"))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def forward(number, frame):
        received.append(number)
        send(
            number if len(received) == 1 else signal.SIGKILL,
            *([] if any(folder.glob("pid.*")) else [process.pid]),
        )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    while process.poll() is None:
        time.sleep(0.1)
        if refusal(folder):
            time.sleep(0.5)  # the message is on its way
            send(signal.SIGKILL, process.pid)
    return process.wait()


def refusal(folder):
    """The code with which a rank refused to run, or None."""
    codes = [path.read_text() for path in folder.glob("exit.*")]
    return next((int(code) for code in codes if code and int(code) in REFUSALS), None)


def recipe_exit_code(launcher_code, folder, ranks):
    """The code with which one rank refused, or that all ranks agree on if it is a clean one, else 1."""
    if refusal(folder):
        return refusal(folder)
    codes = {path.read_text() for path in folder.glob("exit.*")}
    agreed = len(list(folder.glob("exit.*"))) == ranks and len(codes) == 1
    code = int(codes.pop()) if agreed else FAILED
    return code if (launcher_code == 0 or code) and code in CLEAN_EXITS else FAILED


def report(folder, facts, ranks, ranks_per_node):
    """Compare what the ranks measured with the YAML's promise and print it. Returns rows and a verdict."""
    paths = [folder / f"shards.{rank}" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        print("shard report: not measured, the recipe took no optimizer step")
        return [], "not measured"
    rows = judge([json.loads(path.read_text()) for path in paths], facts, ranks_per_node)
    verdict = "ok" if all(row["verdict"] == "ok" for row in rows) else "NOT AS PROMISED"
    print(
        f"shard report: {verdict}"
        + (" (one process: nothing to shard)" if facts["engine"] == "single" else "")
    )
    print(table(rows))
    return rows, verdict


def start_warm(device):
    """Go on as a process of scripts/warm.py; where that cannot be had, say why and return."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = sys.argv.copy()
    words.remove("--warm")  # the first one: behind the recipe's name such a word is the recipe's
    try:
        program = warm.start()
    except OSError as error:
        print(f"warm: a cold start, since {error}", file=sys.stderr)
        return
    os.execv(program, [str(program), *words])


def main():
    parser, args = parse_args()
    if args.warm:
        start_warm(args.device)
    for path in (args.config_file, args.recipe):
        if not Path(path).is_file():
            parser.error(f"{path} does not exist")
    config = read_config(parser, args.config_file)
    facts, device = strategy_of(config), find_device(args.device)
    ranks, ranks_per_node = choose_ranks(parser, args, config, facts, device)
    overrides = find_overrides(args, config, facts, device, ranks)

    print(f"rehearsal of {args.recipe} under {args.config_file}: {ranks} {device} rank(s)")
    for name, old, new, why in overrides:
        print(f"  {name}: {old} -> {new} ({why})")
    for note in find_notes(facts, ranks_per_node) if device == "cpu" else []:
        print(f"  note: {note}")
    sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="rehearsal_") as folder:
        environment = {
            **os.environ,
            "REHEARSAL_FOLDER": folder,
            "REHEARSAL_DEVICE": device,
            "REHEARSAL_RANKS_PER_NODE": str(ranks_per_node),
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        if device == "cpu":
            environment.update(
                ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES=""
            )
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--quiet",
            "--config_file",
            args.config_file,
        ]
        for name, _, new, _ in overrides:
            command += [f"--{name}", new]
        command += ["--main_process_port", str(args.main_process_port or 0)]
        command += [str(Path(__file__).with_name("cpu_ranks.py")), args.recipe, *args.recipe_args]
        launcher_code = launch(command, environment, Path(folder))
        code = recipe_exit_code(launcher_code, Path(folder), ranks)
        rows, verdict = report(Path(folder), facts, ranks, ranks_per_node)
    if args.report:
        settings = {name: new for name, _, new, _ in overrides}
        content = {
            "config_file": args.config_file,
            "recipe": args.recipe,
            "device": device,
            "ranks": ranks,
            "overrides": settings,
            "exit_code": code,
            "verdict": verdict,
            "rows": rows,
        }
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        Path(args.report).write_text(json.dumps(content, indent=2) + "\n")
    if code:
        print(f"the recipe ended with exit code {code}")
    sys.exit(NOT_AS_PROMISED if code == 0 and verdict == "NOT AS PROMISED" else code)


if __name__ == "__main__":
    main()
