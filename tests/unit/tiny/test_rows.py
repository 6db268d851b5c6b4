# SPDX-License-Identifier: Apache-2.0
"""The rows of the makers can be learned, and no training row gives away a test row."""

import re

from tiny import bert, llama_dpo, mistral_pretrain, skills, t5
from tiny.options import LlamaDpoOptions


def subject(row: dict[str, str]) -> str:
    """Return the word or number that a row of skills asks about."""
    for skill in skills.SKILLS:
        if skill.name == row["skill"]:
            pattern = re.escape(skill.question).replace(r"\{\}", "(.+)")
            return re.fullmatch(pattern, row["prompt"])[1]
    raise AssertionError(row)


def prompts(rows: list[llama_dpo.Row]) -> set[str]:
    """Return what the user asks in each row."""
    return {row["prompt"][0]["content"] for row in rows}


def test_skills_answer_their_questions():
    answers = {skill.name: skill.answer("41") for skill in skills.SKILLS}
    assert answers == {
        "spell": "4-1",
        "capitals": "41",
        "backwards": "14",
        "repeat": "41 41",
        "last_letter": "1",
        "count": "2",
        "next_number": "42",
    }


def test_no_test_row_of_skills_asks_about_what_is_trained_on():
    files = skills.make_rows(2000, 70, seed=0)
    assert [len(rows) for rows in files.values()] == [2000, 70]
    held_out = {subject(row) for row in files["test"]}
    assert len(held_out) == 20  # ten words, ten numbers
    assert not held_out & {subject(row) for row in files["train"]}


def test_the_rows_are_those_that_results_were_measured_on():
    rows = skills.make_rows(7, 7, seed=0)["test"]
    assert rows[0] == {
        "prompt": "Spell the word kuk.",
        "completion": "k-u-k",
        "skill": "spell",
    }


def test_preferences_have_a_right_and_a_wrong_answer():
    options = LlamaDpoOptions(num_train_rows=40, num_test_rows=20, num_demonstrations=16)
    files = llama_dpo.make_rows(options)
    sizes = {name: len(rows) for name, rows in files.items()}
    assert sizes == {"train": 40, "test": 20, "demonstrations": 16}
    for row in files["train"] + files["test"]:
        assert row["completion"] == row["chosen"] != row["rejected"]
    held_out = prompts(files["test"])
    assert not held_out & prompts(files["train"])
    assert not held_out & prompts(files["demonstrations"])


def test_texts_of_the_test_rows_are_about_other_people():
    files = mistral_pretrain.make_rows(300, 50, seed=0)
    known = {row["text"].split()[0] for row in files["train"]}
    others = {row["text"].split()[0] for row in files["test"]}
    assert len(known) == 300 and len(others) == 50
    assert not known & others
    for row in files["train"]:
        trade = re.match(r"\w+ is a (\w+) in", row["text"])[1]
        fact = next(one for one in mistral_pretrain.TRADES if one.name == trade)
        assert f"buys {fact.goods}." in row["text"] or "buys" not in row["text"]


def score_of(review: str) -> int:
    """Return the score of a review, worked out from its words."""
    score = 0
    for clause in review.split(" and "):
        words_of_clause = clause.split()
        points = 1 if words_of_clause[-1] in bert.GOOD else -1
        if "not" in words_of_clause:
            points = -points
        if "very" in words_of_clause:
            points = 2 * points
        score += points
    return score


def test_stars_and_class_of_a_review_follow_from_its_words():
    files = bert.make_rows(300, 30, seed=0)
    reviews = {row["text"] for rows in files.values() for row in rows}
    assert len(reviews) == 330
    for row in files["train"]:
        score = score_of(row["text"])
        assert row["stars"] == 3 + score / 4
        assert (row["label"] == "negative") == (score < 0)
        assert (row["label"] == "positive") == (score > 0)
        assert row["label"] in bert.LABELS


def test_a_translation_moves_each_word():
    dictionary = t5.make_dictionary(seed=0)
    assert len(set(dictionary.values())) == len(dictionary)
    english = {foreign: word for word, foreign in dictionary.items()}
    for row in t5.make_rows(50, 10, seed=0)["train"]:
        *phrases, verb = [english[word] for word in row["target"].split()]
        assert verb in t5.VERBS
        turned = " ".join(reversed(phrases)).split()
        source = row["source"].split()
        at_verb = source.index(verb)
        assert turned == source[at_verb + 1 :] + source[:at_verb]
