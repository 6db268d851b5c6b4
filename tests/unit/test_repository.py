"""What a repository is expected to have: a license, a workflow, and forms for issues."""

import yaml

from launching import REPO

FORMS = sorted((REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_workflow_runs_what_the_readme_names():
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert commands[-1] == ".ci/run" and (REPO / ".ci" / "run").stat().st_mode & 0o100
    assert workflow["permissions"] == {"contents": "read"}


def test_the_forms_of_issues_are_complete():
    assert [path.stem for path in FORMS] == ["bug", "config", "question"]
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert form["name"] and form["description"] and form["body"]
            labels = [part["attributes"]["label"] for part in form["body"]]
            assert len(set(labels)) == len(labels)
