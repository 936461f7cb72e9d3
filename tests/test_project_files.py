"""What contributors and their tools read: workflows, hooks, lock, citation, each against what it speaks of."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)[1].split())  # type: ignore[index]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LOCK = (ROOT / "requirements.lock").read_text("utf-8")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def pinned(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_help_lists_every_target_of_the_makefile() -> None:
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+) ", shown, flags=re.MULTILINE)) == TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_only_reads_and_runs_pinned_actions_and_targets_of_the_makefile(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each) for each in uses)
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        program, *targets = command.split()
        assert program == ".ci/run"
        assert set(targets) <= TARGETS


def test_workflows_cover_every_python_plain_processors_and_slow_tests() -> None:
    jobs = {name: job for path in WORKFLOWS for name, job in parsed(path)["jobs"].items()}
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}.items() <= jobs["plain-cpu"]["env"].items()
    assert jobs["slow"]["steps"][-1]["run"] == ".ci/run test-slow"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_an_issue_form_has_a_name_and_labelled_fields(path: Path) -> None:
    form = parsed(path)
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)


def test_hooks_call_tools_of_the_environment_and_need_no_network() -> None:
    (source,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert source["repo"] == "local"
    for hook in source["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].split()[0] in (".venv/bin/ruff", ".venv/bin/mypy")


def test_citation_names_this_version_and_the_paper() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2501.05450"


def test_lock_has_a_hash_for_every_package_and_names_no_host() -> None:
    packages = re.split(r"^(?=[a-z0-9])", LOCK.partition("\n\n")[2] or LOCK, flags=re.MULTILINE)
    bare = [text.split()[0] for text in packages if "==" in text and "--hash=sha256:" not in text]
    assert not bare
    assert "://" not in LOCK


def test_lock_holds_the_versions_of_the_constraints_except_torch() -> None:
    locked, constraints = pinned(LOCK), pinned((ROOT / "constraints.txt").read_text("utf-8"))
    assert not {"torch", "torchvision"} & set(locked)
    others = {name: version for name, version in constraints.items() if name not in ("torch", "torchvision")}
    assert others == {name: locked.get(name) for name in others}


def test_lock_holds_every_direct_dependency() -> None:
    named = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    names = {re.match(r"[A-Za-z0-9_-]+", each)[0].lower().replace("_", "-") for each in named}  # type: ignore[index]
    assert names - set(pinned(LOCK)) == {"archipelago", "torch", "torchvision"}


def test_packages_draw_nothing_with_matplotlib_which_is_an_extra() -> None:
    sources = [path for package in ("ddm", "silo", "aggregator") for path in (ROOT / package).rglob("*.py")]
    imported = {
        name.split(".")[0]
        for path in sources
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert "matplotlib" not in imported
    assert any(each.startswith("matplotlib") for each in PROJECT["optional-dependencies"]["plots"])
