# SPDX-License-Identifier: Apache-2.0
"""Which faults have code of their own in recipes/core, and why: two lists, with each check in one.

A fault gets code only if it is silent (the run would end well, and the model, a figure or the data
would be wrong) or common (most users meet it, and get one line with file, line and fix). All others
end in the library's own exception. A new check fails this test until it is added here: as one more
case of a reason, or with a reason of its own, for which another one has to go.
"""

import ast
from collections import Counter

from launching import REPO

# Reason: {function: words, each of the text of one check}. Without the check, silently:
SILENT = {
    "an engine, ranks or a mesh that were asked for would not be in force": {
        "engine.find_dropped": ["the launcher requested", "no extra of this recipe"],
        "engine.make_layout": ["cannot be combined"],
    },
    "a key of the launched YAML would be ignored": {
        "config_names.find_unknown_keys": ["written twice", "no such key"],
    },
    "an engine would train or average nothing, or train by other numbers than the flags": {
        "engine.find_faults_of_engine": ["trains nothing", "nor average", "line owns", "autotp"],
    },
    "16 bits would lose small updates": {
        "arguments.ModelArguments.conflicts": ["--dtype float16"],
        "engine.find_faults": ["fp16 needs a GPU"],
        "engine.find_faults_of_dtypes": ["--dtype bfloat16"],
    },
    "4-bit weights would be destroyed by a cast": {
        "engine.find_faults_of_dtypes": ["4-bit weights"],
    },
    "a flag would have no effect, since another one contradicts it or what it needs is missing": {
        "arguments.DenseModelArguments.conflicts": ["--load_in_4bit: choose", "for LoRA adapters"],
        "arguments.AdapterArguments.conflicts": ["add --use_peft"],
        "arguments.DataArguments.conflicts": ["--eval_split and"],
        "arguments.MixtureArguments.conflicts": ["--dataset_weights"],
        "arguments.InstructionTuningArguments.conflicts": ["--learn last"],
        "arguments.EvaluationArguments.conflicts": ["--metric_for_best_model"],
        "metrics.find_missing_tracker": ["--report_to"],
    },
    "something else would be trained on than a conversation says": {
        "chat.make_conversation": ["is empty"],
        "chat.from_sharegpt": ["has a message from"],
        "chat.pop_weight": ["it has to be 0"],
        "chat.check_nothing_is_lost": ["which the chat template drops"],
        "chat.close_last_turn": ["without an end"],
    },
    "a data set would be left out, or another one take its place": {
        "data.hold_out_and_mix": ["leaves no row"],
        "data.mix": ["leaves none"],
    },
    "a model that sees the tokens to predict would be trained": {
        "model.find_encoder": ["no causal language model"],
    },
    "a base would be read as something else than its files say": {
        "model.find_other_quantization": ["quantized"],
        "model.load_pretrained": ["is of adapters", "use a whole model"],
    },
    "rows that share a line would see each other": {
        "model.check_model": ["keep the rows of a line apart"],
    },
    "a named module would not be trained": {
        "model.find_untrained": ["none of this name", "reads no text", "share their numbers"],
    },
    "a run would go on with other rows or arguments": {
        "run.Run._refuse_changes": ["had other values"],
    },
    "a run would start over beside its checkpoints, or mix with one that went further": {
        "run.Run._find_checkpoint": ["no checkpoint can be trusted", "went further"],
    },
    "a checkpoint would be read into what does not fit, or could not be read back": {
        "checkpoint.saved_tensors": ["of newer recipes"],
        "checkpoint.fill": ["cannot be continued"],
        "checkpoint.fill_boxes": ["has the shape", "has not all of", "is in {data.dtype}"],
        "boxes.Numbers.as_tensor": ["weight's shape"],
    },
    "broken weights would take the place of good checkpoints": {
        "checkpoint.Checkpoints.begin": ["no checkpoint is made"],
    },
    "the model that is saved would not be the best": {
        "run.Run.check_plan": ["needs rows to evaluate on"],
        "run.Run._note_if_best": ["an evaluation has"],
        "run.Run._load_best": ["the model of the best evaluation"],
    },
    "a result, rows or another run would be overwritten": {
        "run.Run.__init__": ["choose another"],
        "run.take_folder": ["another run is writing there"],
    },
}
# Most users meet these
COMMON = {
    "a value of a flag that cannot be": {
        "arguments.DataArguments.conflicts": ["has to be ROLE=COLUMN"],
        "arguments.RunArguments.conflicts": ["--resume_from_checkpoint"],
        "cli.find_conflicts": ["must be"],
        "cli.read_json_object": ["is not a JSON object"],
    },
    "a file of --config that is not there, or has other keys": {
        "cli.words_of_file": ["' '.join", "{key}"],
    },
    "an extra whose folder was not copied": {"extras.find_missing": ["is not there"]},
    "a launch that accelerate cannot run": {
        "engine.make_accelerator": ["accelerate cannot run"],
    },
    "files of rows, a split or a hub id that are not there or cannot be read": {
        "data.open_rows": ["convert it", "no rows in split", "is empty"],
        "data.Rows.filter": ["no row is left"],
        "data.end_without_rows": ["{error}", "{in_one_line(cause)}"],
    },
    "a line that is no JSON": {
        "data.parse_line": ["is not JSON:", "not a JSON object"],
        "data.prepare_batch": ["*named, advice"],
    },
    "a row with other columns, or with messages and tools of another form": {
        "data.rename_columns": ["list_columns"],
        "chat.read_conversation": ["missing_columns"],
        "chat.read_message": ["is no object with role"],
        "chat.read_content": ["has no text"],
        "chat.read_functions": ["objects with a name"],
        "chat.read_call": ["arguments of a call"],
        "chat.read_tool": ["name"],
    },
    "a row without an answer to train on": {
        "chat.make_conversation": ["are by"],
        "chat.label_tokens": ["follows from the prompt", "within --max_length"],
    },
    "a conversation that its chat template refuses": {
        "chat.ChatTemplate.render_marked": ["is refused"],
    },
    "no row that can be used": {"data.prepare_source": ["none of its rows"]},
    "a model or a tokenizer that cannot be loaded": {
        "model.loading": ["no {what}"],
    },
    "a tokenizer with tokens that the model does not have": {
        "model.check_model": ["has no embedding for it"],
    },
    "a folder that cannot be written to, or a full disk": {
        "run.take_folder": ["{error}"],
        "checkpoint.Checkpoints._make_staging_folder": ["ENOSPC"],
        "checkpoint.Checkpoints._on_rank_0.work_or_end": ["could not be finished"],
        "export.save_model": ["could not be written"],
    },
}
ENDING = {"fail", "error", "refuse", "_end", "save_and_end"}  # what ends a run, by its name
WELL = ("Exit.DONE", "Exit.STOPPED")


def checks_in(node, place=()):
    """(function, text) of each refusal below a node: what ends a run, or finds a row at fault.

    What only hands on the text of another one, as `fail(Exit.USAGE, *problems)` does, is none.
    """
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*place, child.name)
        said = []
        if isinstance(child, ast.Yield) and inner[-1].startswith(("find_", "conflicts")):
            said = [child.value]
        elif isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            name = ast.unparse(child.exc.func)
            said = child.exc.args if name == "End" or name.endswith("Error") else []
        elif isinstance(child, ast.Call):
            name = ast.unparse(child.func).rpartition(".")[2]
            said = child.args if name in ENDING else []
        texts = [ast.unparse(one) for one in said if not isinstance(one, ast.Name | ast.Starred)]
        own = [text for text in texts if text != "str(error)" and not text.startswith("Exit.")]
        if own and not any(text in WELL for text in texts):
            yield ".".join(inner), " ".join(own)
        yield from checks_in(child, inner)


def test_each_check_of_the_core_is_silent_or_common():
    listed = []
    for cases in (*SILENT.values(), *COMMON.values()):
        listed += [(place, word) for place, words in cases.items() for word in words]
    found = []
    for path in sorted((REPO / "recipes" / "core").glob("*.py")):
        if path.stem != "exits":  # It is how all of them end
            found += checks_in(ast.parse(path.read_text()), (path.stem,))
    for place, text in found:
        reasons = [word for function, word in listed if function == place and word in text]
        assert len(reasons) == 1, f"{place} refuses {text}: is that silent or common?"
    counts = Counter(place for place, _ in found)
    assert counts == Counter(place for place, _ in listed), "a check that is listed is gone"


def test_there_is_no_room_for_more_reasons():
    assert len(SILENT) <= 18 and len(COMMON) <= 15
