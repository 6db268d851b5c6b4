# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: the plan of one config, or what fits a card."""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from . import candidates, recipe, remedies, table, yaml_files
from .cards import GIB, USUAL_CARD, bytes_of, describe, with_constants
from .closed_form import closed_form, part_of, run_step, strategy_for
from .errors import CannotWriteError, UnplannableError
from .ledger import Sizes
from .mesh import misfits_of_model
from .output import TERMINAL, Report, write_json
from .pipeline import fullest, peaks_of_ranks
from .plan import Plan, plan_of
from .recipe import RecipeArguments
from .request import Batch, Request, batch_of
from .saving import Saving, saving_of
from .shapes import read_model_config
from .yaml_files import Config

FITS, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class Question:
    """A request whose command line has been parsed."""

    request: Request
    args: RecipeArguments
    config: PretrainedConfig  # the model's config
    batch: Batch
    card: int | None  # bytes


def read_question(request: Request) -> Question:
    """Return the question that a request asks.

    Raises:
        UnplannableError: if it cannot be planned.
        SystemExit: after the recipe's refusal.
    """
    request = with_recipe(request)
    # What a file gives counts as given, so that the planner proposes nothing else for it
    words = recipe.with_config_read(request.words, request.recipe)
    request = replace(request, words=words)
    args = recipe_arguments(request)
    card = bytes_of(request.gpu)
    config = read_model_config(args.model_name_or_path, args.model_revision)
    return Question(request, args, config, batch_of(args, request), card)


def with_recipe(request: Request) -> Request:
    """Return the request with the recipe that trains its model, if it names none."""
    if request.names_recipe:
        return request
    config = read_model_config(request.model, request.revision)
    return replace(request, recipe_of_model=recipe.recipe_for(config))


def recipe_arguments(request: Request) -> RecipeArguments:
    """Return the recipe's own arguments; by default the card decides the size of the loss's pieces.

    The recipe derives --max_logits_mib from the GPU that it finds. Here that is the card that is
    planned for.
    """
    args = recipe.parse_words(request.recipe_words(), request.recipe)
    if args.max_logits_mib is None:
        card = bytes_of(request.gpu) or USUAL_CARD
        return recipe.with_values(args, max_logits_mib=recipe.logits_mib_on(card))
    return args


def answer(request: Request, yaml: Config | None) -> int:
    """Print or write the answer to a request; return the exit code.

    yaml: the config to plan for, or None to choose one. Raises PlannerError.
    """
    question = read_question(request)
    if request.plot:
        if recipe.is_pipelined(question.args):
            raise UnplannableError(
                "--plot draws the strategies of recipes/llama.py: leave it out for pipelines"
            )
        draw(question, yaml, request.plot)
    if yaml is None:
        return choose(question)
    report = plan_one(question, yaml)
    give(question, report)
    return exit_code(report.fits)


def give(question: Question, found: Report | table.Choice) -> None:
    """Print or write what was found, and what it does not count."""
    notes = not_counted(question.args)
    content = found.as_object()
    if notes:
        content["not_counted"] = notes
    write_json(question.request.json, content)
    if question.request.json != TERMINAL:
        print(found)
        for note in notes:
            print(f"not counted: {note}")


def not_counted(args: RecipeArguments) -> list[str]:
    """Return what takes memory under these arguments and is in no plan."""
    if not getattr(args, "predict_with_generate", False):
        return []
    return [
        "the key-value cache of --predict_with_generate, while nothing is kept for a backward "
        "pass; a smaller --per_device_eval_batch_size or --generation_max_new_tokens shrinks it"
    ]


def exit_code(is_enough: bool) -> int:
    """Return the exit code for whether a card is enough."""
    if is_enough:
        return FITS
    return DOES_NOT_FIT


def plan_one(question: Question, yaml: Config) -> Report:
    """Return the plan of one config."""
    request = question.request
    plan = plan_of(
        question.args,
        yaml,
        request.num_processes,
        request.num_machines,
        request.mixed_precision,
    )
    if plan.pp > 1:
        report = plan_pipeline(question, plan)
    else:
        report = report_of(question, plan, *peak_of(plan, question))
    if request.simulate:  # It traces no evaluation.
        return report
    hints = [hint_on_evaluation(question, plan, report.peak), hint_on_routers(question, plan)]
    return replace(report, hints=[hint for hint in hints if hint])


def hint_on_evaluation(question: Question, plan: Plan, peak: int) -> str:
    """Return how to lower a peak that evaluation decides, or "" if a training step does.

    A forward pass over no more tokens than in a training step takes no more than the step. Under
    sequence parallelism a rank evaluates whole rows, of which it trains a part.
    """
    args = plan.args
    rows = args.per_device_eval_batch_size
    if args.eval_strategy == "no" or rows * plan.sp <= question.batch.sequences:
        return ""
    light = replace(plan, args=recipe.with_values(args, **{candidates.EVALUATION: 1}))
    if plan.pp > 1:
        device = fullest(peaks_of_ranks(light, question.config, question.batch)).device
    else:
        device, _ = peak_of(light, question)
    lower = sum(with_constants(device, plan.ranks).values())
    if lower >= peak:
        return ""
    return (
        f"evaluation, of {rows} rows at a time, takes more than training: with "
        f"--{candidates.EVALUATION} 1 the peak is {lower / GIB:.3f} GiB"
    )


def hint_on_routers(question: Question, plan: Plan) -> str:
    """Return what a GPU takes whose experts get many tokens, or "" if no GPUs share experts."""
    if plan.ep == 1:
        return ""
    strategy, decoder = strategy_for(plan, question.config)
    part = part_of(question.batch, plan.copies)
    tokens = part.sequences * part.length
    spread = [layer.experts for layer in decoder.layers if layer.experts is not None]
    arrived = tuple(2 * tokens * experts.per_token for experts in spread)
    device, _ = run_step(plan, strategy, decoder, replace(question.batch, arrived=arrived))
    peak = sum(with_constants(device, plan.ranks).values())
    return (
        "every expert is planned to get the same number of tokens: a GPU whose experts get twice "
        f"as many takes {peak / GIB:.3f} GiB"
    )


def plan_pipeline(question: Question, plan: Plan) -> Report:
    """Return the plan of the fullest rank of a pipeline, with the peaks of all."""
    if question.request.simulate:
        raise UnplannableError(
            f"--simulate: traces whole models, of which a rank of {plan.name} has stages: plan "
            "without --simulate"
        )
    peaks = peaks_of_ranks(plan, question.config, question.batch)
    highest = fullest(peaks)
    ranks = {}
    for peak in peaks:
        device = with_constants(peak.device, plan.ranks)
        ranks[peak.describe()] = sum(device.values())
    return replace(report_of(question, plan, highest.device, highest.host), ranks=ranks)


def report_of(question: Question, plan: Plan, device: Sizes, host: Sizes) -> Report:
    """Return the report of the bytes that tensors take, {category: bytes}."""
    request = question.request
    device = with_constants(device, plan.ranks)
    method = "closed form"
    if request.simulate:
        method = "traced"
    card_note = ""
    if request.gpu:
        card_note = describe(request.gpu)
    saving = saving_under(plan, question.config)
    return Report(
        title=title_of(plan, question.batch),
        method=method,
        device={category: size for category, size in device.items() if size},
        host=host,
        saving=saving,
        card=question.card,
        card_note=card_note,
    )


def saving_under(plan: Plan, config: PretrainedConfig) -> Saving | None:
    """Return what a save takes on the host; None for a model that only a trace can plan."""
    try:
        return saving_of(plan, config)
    except UnplannableError:
        return None


def peak_of(plan: Plan, question: Question) -> tuple[Sizes, Sizes]:
    """Return the bytes that tensors take at the peak, on the device and on the host."""
    if question.request.simulate:
        from .trace import simulate  # Only a trace needs torch's private memory trackers.

        return simulate(plan, question.config, question.batch), {}
    return closed_form(plan, question.config, question.batch)


def title_of(plan: Plan, batch: Batch) -> str:
    """Return one line that says what is planned."""
    holders = "rank"
    if plan.copies > 1:
        holders = f"{plan.copies} ranks"
    if plan.pp > 1:
        holders = "pipeline"
    return (
        f"{plan.args.model_name_or_path} under {plan.name}, {plan.ranks} x GPU, "
        f"mixed precision {plan.mixed_precision}: "
        f"{batch.sequences} x {batch.length} tokens per {holders}"
    )


def choose(question: Question) -> int:
    """Print or write which ways to run fit the card; return the exit code."""
    request = question.request
    if request.simulate:
        raise UnplannableError("--simulate traces one plan: add a --config_file")
    if recipe.is_pipelined(question.args):
        raise UnplannableError(
            "recipes/llama_pipeline.py runs under one YAML: add --config_file "
            "accelerate_configs/pp.yaml"
        )
    assert question.card is not None  # Request.check: without a config there is a card.
    launch = candidates.launch_of(request, question.args, question.config, question.card)
    ways = candidates.ways_on(launch, launch.ranks)
    fitting = candidates.fitting_among(launch, ways)
    told = fitting
    if not request.json:
        told = table.shown(fitting)
    limited = {way: candidates.with_limits(launch, way) for way in told}
    fitting = [limited.get(way, way) for way in fitting]
    remedy = remedies.remedy_for(launch, ways, fitting)
    give(question, table.Choice(launch, question.batch, ways, fitting, remedy))
    return exit_code(bool(fitting))


def draw(question: Question, yaml: Config | None, path: str) -> None:
    """Draw all strategies on the requested number of ranks into a file.

    Raises UnplannableError if there is none, CannotWriteError if the picture cannot be written.
    """
    from . import plot  # Only a picture needs matplotlib.

    request = question.request
    batch = question.batch
    ranks = ranks_to_draw(request, yaml)
    plans = plans_on(question, ranks)
    if not plans:
        raise UnplannableError("--plot: no strategy takes these arguments")
    title = (
        f"{question.args.model_name_or_path}, {ranks} GPUs, "
        f"{batch.sequences} x {batch.length} tokens per micro-batch"
    )
    figure = plot.draw(title, plans, question.config, batch, question.card)
    try:
        plot.write(figure, path)
    except (OSError, ValueError) as error:
        raise CannotWriteError(path, error) from None


def ranks_to_draw(request: Request, yaml: Config | None) -> int:
    """Return the number of ranks of the command line, else of the config, else 1."""
    if request.num_processes:
        return request.num_processes
    if yaml is None:
        return 1
    return max(yaml.get("num_processes") or 1, yaml_files.strategy_of(yaml).places)


def plans_on(question: Question, ranks: int) -> dict[str, Plan]:
    """Return the plan of each shipped config that the ranks allow and the recipe accepts.

    Those under which ranks share rows are there with each size of their mesh, and those under which
    they share experts with each size of a group.
    """
    request = question.request
    plans = {}
    launches = candidates.launches_on(question.args, ranks, request.machines)
    for path, config, sizes in launches:
        args = candidates.with_light_evaluation(question.args, request)
        args = recipe.with_values(args, **sizes)
        try:
            plan = plan_of(args, config, ranks, request.num_machines, request.mixed_precision)
        except UnplannableError:
            continue
        if not misfits_of_model(question.config, plan.mesh):
            plans[candidates.name_of(path.stem, plan)] = plan
    return plans
