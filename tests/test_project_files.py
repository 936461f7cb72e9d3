"""What contributors and their tools read: workflows, hooks, lock, citation, each against what it speaks of."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)[1].split())  # type: ignore[index]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LOCKS = {
    name: (ROOT / f"{name}.lock").read_text("utf-8")
    for name in ("requirements", "torch", "torch-cpu")
}


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def pinned(text: str) -> dict[str, str]:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in pins}


def test_help_lists_every_target_of_the_makefile() -> None:
    shown = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^  make ([a-z-]+) ", shown, flags=re.MULTILINE)) == TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_only_reads_and_runs_pinned_actions_and_targets_of_the_makefile(
    path: Path,
) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use) for use in uses)
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        program, *targets = command.split()
        assert program == ".ci/run"
        assert set(targets) <= TARGETS


def test_workflows_cover_every_python_plain_processors_and_slow_tests() -> None:
    jobs = {name: job for path in WORKFLOWS for name, job in parsed(path)["jobs"].items()}
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}.items() <= jobs[
        "plain-cpu"
    ]["env"].items()
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


def unhashed(lock: str) -> list[str]:
    packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    return [text.split()[0] for text in packages if "==" in text and "--hash=sha256:" not in text]


def test_locks_have_a_hash_for_every_package_and_name_no_host_or_folder() -> None:
    for lock in LOCKS.values():
        assert pinned(lock)
        assert not unhashed(lock)
        assert "://" not in lock and "--find-links" not in lock
    assert unhashed("a==1 \\\n    --hash=sha256:00\nb==2\n") == ["b==2"]


def test_locks_hold_the_versions_of_the_constraints() -> None:
    constraints = pinned((ROOT / "constraints.txt").read_text("utf-8"))
    torch = {name: constraints.pop(name) for name in ("torch", "torchvision")}
    locked = pinned(LOCKS["requirements"])
    assert constraints == {name: locked.get(name) for name in constraints}
    assert not torch.keys() & locked.keys()
    assert torch.items() <= pinned(LOCKS["torch"]).items()
    assert {**torch, "torch": f"{torch['torch']}+cpu"} == pinned(LOCKS["torch-cpu"])


def test_locks_hold_every_direct_dependency_and_the_build_backend() -> None:
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"][
        "requires"
    ]
    named = [
        *PROJECT["dependencies"],
        *(
            requirement
            for extra in PROJECT["optional-dependencies"].values()
            for requirement in extra
        ),
    ]
    names = {
        re.match(r"[A-Za-z0-9_-]+", requirement)[0].lower().replace("_", "-")
        for requirement in [*named, *backend]
    }  # type: ignore[index]
    assert names - pinned(LOCKS["requirements"]).keys() == {
        "archipelago-ddm",
        "torch",
        "torchvision",
    }


def test_everything_installed_is_in_a_lock() -> None:
    """What `make setup` built: no distribution came from elsewhere, in another version or without a hash."""
    locked: dict[str, set[str]] = {}
    for lock in LOCKS.values():
        for name, version in re.findall(
            r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, flags=re.MULTILINE
        ):
            locked.setdefault(canonicalize_name(name), set()).add(version)
    installed = {
        canonicalize_name(distribution.name): distribution.version
        for distribution in distributions()
    }
    assert {name: v for name, v in installed.items() if v not in locked.get(name, ())} == {
        "archipelago-ddm": PROJECT["version"]
    }


def test_setup_installs_by_hash_alone_and_ci_names_packages_by_version() -> None:
    commands = [
        line for line in MAKEFILE.splitlines() if "pip install" in line or "_INSTALL)" in line
    ]
    assert sum("--require-hashes -r $(1)" in line for line in commands) == 1
    assert all(
        re.search(
            r"^(PIP|UV)_INSTALL = .*--no-deps$|--require-hashes -r|--no-build-isolation -e \.$",
            line,
        )
        for line in commands
    )
    lists = (ROOT / ".ci" / name for name in ("packages", "packages.slow"))
    packages = [
        line for path in lists for line in path.read_text().splitlines() if not line.startswith("#")
    ]
    assert packages and all(re.fullmatch(r"[a-z0-9-]+=[0-9][^=]*", line) for line in packages)


@pytest.mark.slow
def test_bill_of_materials_lists_what_is_installed(tmp_path: Path) -> None:
    bill = tmp_path / "sbom.cdx.json"
    words = [
        "environment",
        sys.executable,
        f"--pyproject={ROOT}/pyproject.toml",
        "--output-reproducible",
        "-o",
        str(bill),
    ]
    subprocess.run(
        [Path(sys.executable).with_name("cyclonedx-py"), *words], check=True, capture_output=True
    )
    document = json.loads(bill.read_text("utf-8"))
    assert (
        document["bomFormat"] == "CycloneDX"
        and document["metadata"]["component"]["name"] == "archipelago-ddm"
    )
    listed = {
        (canonicalize_name(component["name"]), component["version"])
        for component in document["components"]
    }
    assert {
        (canonicalize_name(distribution.name), distribution.version)
        for distribution in distributions()
    } - listed <= {("archipelago-ddm", PROJECT["version"])}
    assert str(ROOT) not in bill.read_text("utf-8")


def test_packages_draw_nothing_with_matplotlib_which_is_an_extra() -> None:
    sources = [
        path for package in ("ddm", "silo", "aggregator") for path in (ROOT / package).rglob("*.py")
    ]
    imported = {
        name.split(".")[0]
        for path in sources
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert "matplotlib" not in imported
    assert any(
        requirement.startswith("matplotlib")
        for requirement in PROJECT["optional-dependencies"]["plots"]
    )
