# SPDX-License-Identifier: Apache-2.0
"""Words and turns of phrase that the documents, help texts, docstrings and comments do not use.

Each rule was taken from sentences that readers had to read twice. A rule names what to write
instead. prose_files.py reads the prose of each kind of file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

UNITS = (
    r"bytes|bits|flags?|GiB|iterations|lines?|loss|MiB|ms|objects?|rows|seconds|steps|times|tokens"
    r"|traffic"
)
OF_WHAT = r"batch|character|GPU|logged|parameter|rank|row|save|second|step|trained"


@dataclass(frozen=True)
class Rule:
    """A pattern of prose (case does not count), and what to write instead."""

    pattern: str
    instead: str


RULES = (
    Rule(r"\blearnt\b", "trained on, learned"),
    Rule(r"\b(?:goes|going|went) on\b|\bgo on\b(?!\.)", "resume, continue"),
    Rule(r"\bmend(?:s|ed|ing)?\b", "fix"),
    Rule(r"\banew\b", "from scratch, again"),
    Rule(r"\bfor want of\b", "for lack of"),
    Rule(r"\bcannot be had\b", "is not possible"),
    Rule(rf"\b(?:{UNITS}) an? (?:{OF_WHAT})\b", "per step, per GPU, per parameter"),
    Rule(r"\balone\b", "only, on its own"),
    Rule(r"\bsuch as\b[^.:;]*\bsuch as\b", "e.g., or two sentences"),
    Rule(r"^(?:counted|made|measured|planned|told|trained) (?:is|are|in)\b", "a subject first"),
    Rule(
        r"\bwhat (?:became of|holds them|is no tensor|it brings|keeps a run|the fullest"
        r"|two recipes have)\b",
        "name the thing",
    ),
    Rule(r"^(?:else|of)\b(?!.*\?$)", "a full clause"),
    Rule(
        r"\bpacked lines?\b|\blines of `?(?:--max_length|code)`? tokens"
        r"|\bbatch\w*( \w+)* counts? lines\b",
        "packed sequences",
    ),
    Rule(r"\b(?:lie|lies|stand|stands) (?:beside|in|on|there|under)\b(?! for)", "is, is stored"),
    Rule(
        r"\w*(?:behaviou|colou)r|\b(?:initial|normal|optim|serial|token)is(?:e|ed|es|ing)\b", "US"
    ),
    Rule(r"\bnext to no\b", "almost no"),
    Rule(r"\bat the floor\b", "no overhead"),
    Rule(r"\b(?:is|are) found out\b", "is detected"),
    Rule(r"\bto work on,", "to keep working"),
    Rule(r"\brows and some GPUs\b", "a dataset and a few GPUs"),
    Rule(r"(?:^|: )its place is\b", "use ... instead"),
    Rule(r"\bdata are\b", "datasets can be, data is"),
    Rule(r"\bwrites no line\b|\bread about later\b", "is not logged, is reported later"),
    Rule(r"\bis whole tensors\b", "full, unsharded tensors"),
    Rule(r"\bless computed\b|\band nor do(?:es)?\b", "a full clause"),
    Rule(r", or rehearse\b", "a full sentence"),
    Rule(r"\b(?:reason|reasons) beside it\b", "justify it in a comment"),
    Rule(r"\binside of\b", "inside, of each"),
    Rule(r"\badapters want\b|(?:^|: )do not$", "use, disables"),
    Rule(
        r"\bat a step whose\b|\bmay differ from the checkpoint's\b", "what to do when, is allowed"
    ),
    Rule(r"\bnothing behind it\b|\bso (?:many|much) \w+ at most\b|\bonly so many\b", "at most N"),
    Rule(r"\bwas asked for more\b", "no GPU found"),
    Rule(r"\bcannot be trained itself\b", "name the flag that is missing"),
    Rule(r"\bStopped by Terminated\b", "Stopped by SIGTERM"),
    Rule(r"\btensors unequal\b", "differences: 0"),
    Rule(r"\bleads past\b", "the reason for the code"),
    Rule(r"\b(?:of|with|on) so many\b", "name the number: `steps` steps"),
    Rule(
        r"\btells (?:all|most|of|what|whether|which)\b|\btold (?:after|all|by|in|of)\b",
        "says, reports, prints",
    ),
    Rule(r"\bthat (?:is|are) there\b", "existing"),
    Rule(r"\b(?:the|a) way out\b", "the fix"),
    Rule(
        r"\banybody(?:'s| else)|\bmakes nobody\b|\bnobody (?:else|ever|would|could|listens)\b",
        "no process, other people's, the passive",
    ),
    Rule(r"(?:^|[.:] )not called by hand\b", "it is not meant to be called by hand"),
    Rule(r"\bhad no time\b", "ran out of time"),
    Rule(r"\blets go of\b", "releases"),
    Rule(r"\bneeds nothing of\b|\bcode of theirs\b", "needs nothing else from, their own code"),
    Rule(r"\bin small\b", "a small one"),
    Rule(r"\bis no (?:error|finding|reason|tensor)\b", "is not an error"),
)


@dataclass(frozen=True)
class Prose:
    """A piece of prose, and the number of its first line."""

    line: int
    text: str


def findings(pieces: Iterator[Prose], name: str) -> list[str]:
    """`FILE:LINE: what was found: what to write instead`, one for each match of a rule."""
    found = []
    for piece in pieces:
        for rule in RULES:
            for match in re.finditer(rule.pattern, piece.text, re.IGNORECASE):
                found.append(f"{name}:{piece.line}: {match[0]!r}: {rule.instead}")
    return found
