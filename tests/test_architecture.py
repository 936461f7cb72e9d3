"""The rules of the house, held by reading the source: arrows between rooms, doors of frameworks, errors."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ddm import errors
from ddm.system.console import EXIT_INTERRUPTED, EXIT_OS, EXIT_TERMINATED

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddm", "silo", "aggregator")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# The floor plan: each room, and the rooms of its package that it may import, all of them further down in this table.
# Rooms are the folders of a package and the files beside them. An arrow that is no longer used must go from here too.
ROOMS = {
    "ddm": {
        "cli": "distillation encoders ensemble errors evaluation export fetching footprint images io islands loading "
        "models pages protocol publishing sampling serving system training trust",
        "serving": "diffusion encoders ensemble errors io loading pages protocol sampling system",
        "export": "diffusion distillation encoders ensemble errors footprint io loading models pages protocol "
        "routers sampling system",
        "islands": "diffusion encoders errors images io loading models partition planning protocol publishing "
        "routers system training trust",
        "publishing": "ensemble errors evaluation fetching io loading models pages protocol routers system statistics "
        "trust",
        "planning": "audit encoders errors footprint io loading models partition protocol routers statistics "
        "system training",
        "audit": "diffusion evaluation images protocol",
        "evaluation": "encoders errors images io loading pages protocol system",
        "distillation": "diffusion encoders ensemble errors footprint images io loading models protocol sampling "
        "system training",
        "loading": "diffusion encoders ensemble errors fetching footprint io models partition protocol routers "
        "sampling statistics system trust",
        "limits": "errors footprint io models protocol statistics",
        "footprint": "encoders models protocol",
        "ensemble": "diffusion encoders errors io protocol routers sampling",
        "sampling": "diffusion errors io protocol routers system",
        "statistics": "diffusion errors images io privacy protocol routers",
        "routers": "diffusion encoders errors io models partition protocol system training",
        "training": "diffusion errors images io models privacy protocol system",
        "encoders": "errors images io protocol system",
        "models": "errors io protocol system",
        "partition": "errors io protocol system",
        "transport": "errors io protocol system",
        "fetching": "errors io protocol system trust",
        "trust": "errors io protocol",
        "pages": "errors io system",
        "services": "errors io system",
        "images": "errors io protocol system",
        "io": "errors protocol",
        "privacy": "diffusion errors protocol",
        "diffusion": "errors",
        "protocol": "errors",
        "system": "errors",
        "errors": "",
    },
    "silo": {
        "cli": "commands",
        "commands": "check config courier data decisions images outlook plan privacy review running services setup "
        "worker",
        "review": "audit config decisions plan privacy worker",
        "check": "config courier decisions privacy worker",
        "running": "config courier guide query_note worker",
        "guide": "config plan worker",
        "client_app": "courier",
        "services": "config",
        "setup": "config courier data images privacy",
        "outlook": "audit config data",
        "worker": "audit config data decisions images plan privacy query_note",
        "audit": "config data",
        "courier": "config query_note",
        "data": "config images",
        "plan": "config",
        "privacy": "config",
        "images": "config decisions",
        "decisions": "config",
        "query_note": "",
        "config": "",
    },
    "aggregator": {
        "cli": "commands",
        "commands": "config intake keys membership monitoring planning release router runtime services setup",
        "monitoring": "config intake membership runtime",
        "release": "config intake keys router",
        "planning": "config intake keys membership",
        "runtime": "config intake membership transfer",
        "services": "config",
        "setup": "config keys",
        "keys": "config intake membership",
        "router": "config intake",
        "intake": "config membership transfer",
        "membership": "config",
        "server_app": "config transfer",
        "config": "",
        "transfer": "",
    },
}

# Who may import a framework; everyone else goes through these files.
DOORS = {
    "flwr": {
        *("ddm/transport/flower.py", "silo/client_app.py", "aggregator/server_app.py"),
        *("ddm/transport/superexec.py", "silo/courier/node.py", "aggregator/runtime/superlink.py"),
        *("ddm/transport/flower_log.py", "ddm/transport/clientapp.py"),
        "silo/courier/connection.py",
    },
    "tuf": {"ddm/trust/"},
    "securesystemslib": {"ddm/trust/"},
    "safetensors": {"ddm/io/tensors.py"},
    "dp_accounting": {"ddm/privacy/accounting.py"},
    "monai": {"ddm/system/monai.py"},
    "nibabel": {
        "ddm/io/pictures.py",
        "ddm/images/nifti.py",
        "ddm/images/mgh.py",
        "ddm/images/orientation.py",
    },
    "tensorboard": {"ddm/training/writers.py"},
    "tifffile": {"ddm/images/tiff.py", "ddm/images/tiff_samples.py"},
    "imagecodecs": {"ddm/images/tiff_samples.py"},
    "pydicom": {"ddm/images/dicom.py", "ddm/images/dicom_tags.py"},
    "accelerate": {"ddm/training/distributed.py"},
    "timm": {"ddm/encoders/timm.py"},
    "transformers": {"ddm/encoders/text.py", "ddm/encoders/vision.py"},
    "tokenizers": {"ddm/encoders/text.py"},
    "wandb": {"ddm/training/writers.py"},
    "huggingface_hub": {"ddm/fetching/hub.py"},
    # The last two meet what Flower's own connection raises.
    "httpx": {"ddm/fetching/hub.py", "aggregator/server_app.py", "silo/courier/connection.py"},
}


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a file, once a session."""
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path: Path, *, lazily: bool = True) -> frozenset[str]:
    """Return the modules a file imports; with lazily=False, only those that importing the file imports."""
    tree = parsed(path)
    nodes = ast.walk(tree) if lazily else _eager(tree)
    modules = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return frozenset(modules)


def _eager(tree: ast.Module) -> Iterator[ast.AST]:
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("ddm", {"silo", "aggregator"}), ("silo", {"aggregator"}), ("aggregator", {"silo"})],
)
def test_packages_import_only_along_the_arrows(package: str, forbidden: set[str]) -> None:
    violations = {
        f"{name(path)} imports {module}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if "flower_app"
        not in path.parts  # the wrapper's client half names the silo's app by design
        for module in imports(path)
        if module.split(".")[0] in forbidden
    }
    assert not violations


def room_of(module: str, package: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else None


def arrows(package: str) -> dict[str, set[str]]:
    """Return for every room of a package the rooms of the package that it imports, at any depth of its code."""
    imports: dict[str, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room == "__init__" or "flower_app" in path.parts:
            continue
        targets = {room_of(module, package) for module in imported_names(path)}
        imports.setdefault(room, set()).update(
            target for target in targets if target not in (None, room)
        )  # type: ignore[misc]
    return imports


def imported_names(path: Path) -> Iterator[str]:
    """Yield what a file imports, `from a import b` as a.b, since b may be a room."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_rooms_are_those_of_the_floor_plan_and_run_downwards(package: str) -> None:
    plan = {room: set(targets.split()) for room, targets in ROOMS[package].items()}
    assert arrows(package) == plan
    order = list(plan)
    upwards = {
        (room, target)
        for room in plan
        for target in plan[room]
        if order.index(target) <= order.index(room)
    }
    assert not upwards


def test_every_room_says_in_one_sentence_what_it_is() -> None:
    rooms = [path for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")]
    violations = [
        name(path) for path in rooms if not (ast.get_docstring(parsed(path)) or "").endswith(".")
    ]
    assert not violations


@pytest.mark.parametrize("framework", sorted(DOORS))
def test_each_framework_has_one_door(framework: str) -> None:
    violations = {
        name(path)
        for path in SOURCES
        if any(module.split(".")[0] == framework for module in imports(path))
        and not any(
            name(path) == door or (door.endswith("/") and name(path).startswith(door))
            for door in DOORS[framework]
        )
    }
    assert not violations


LIGHT = (
    "ddm",
    "ddm.protocol.plan",
    "ddm.protocol.submission",
    "ddm.protocol.manifest",
    "ddm.trust.verify",
    "ddm.loading.release",
    "ddm.privacy.accounting",
    "silo.setup",
    "silo.data.declared",
    "silo.worker.approval",
    "silo.worker.pause",
    "silo.worker.status",
    "silo.courier.service",
    "ddm.transport.flower",
    "ddm.cli.main",
    "silo.cli",
    "aggregator.cli",
    "silo.client_app",
    "aggregator.server_app",
    "aggregator.runtime.running",
    "aggregator.intake.limits",
    "aggregator.monitoring.probes",
    "aggregator.monitoring.live",
)
IMPORTED = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(module)
    if found := set(sys.argv[1].split()) & set(sys.modules):
        sys.exit(f"{module} imports {found}")
"""


def import_one_after_another(*modules: str, without: str) -> None:
    """Import in a process of its own, where none of the modules may pull in any of `without`."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, without, *modules]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_light_modules_pull_in_no_torch() -> None:
    import_one_after_another(*LIGHT, without="torch")
    with pytest.raises(AssertionError, match="ddm.models imports"):
        import_one_after_another("ddm.models", without="torch")


def test_commands_pull_in_the_clients_of_hosts_only_where_a_host_is_named() -> None:
    import_one_after_another(*LIGHT, without="huggingface_hub tuf.ngclient")
    with pytest.raises(AssertionError, match=r"ddm\.fetching\.opening imports"):
        import_one_after_another("ddm.fetching.opening", without="tuf.ngclient")


def test_library_and_its_commands_pull_in_no_web_server() -> None:
    import_one_after_another("ddm", "ddm.cli.main", without="starlette uvicorn")
    with pytest.raises(AssertionError, match=r"ddm\.pages\.serving imports"):
        import_one_after_another("ddm.pages.serving", without="uvicorn")


def test_protocol_pulls_in_neither_torch_nor_flower() -> None:
    protocol = ("ddm.protocol.plan", "ddm.protocol.submission", "ddm.protocol.manifest")
    import_one_after_another(*protocol, without="torch flwr numpy")


def test_nothing_unpickles() -> None:
    forbidden = ("torch.load(", "pickle.load", "allow_pickle=True", "joblib.load")
    violations = {
        f"{name(path)}: {text}"
        for path in SOURCES
        for text in forbidden
        if text in path.read_text("utf-8")
    }
    assert not violations


def error_classes() -> list[type[errors.ArchipelagoError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ArchipelagoError) and kind.__module__ == errors.__name__
    ]


def test_errors_have_distinct_codes_a_remedy_and_a_name_that_ends_in_error() -> None:
    kinds = error_classes()
    assert len({kind.exit_code for kind in kinds}) == len(kinds)
    assert all(kind.__name__.endswith("Error") and kind.default_remedy for kind in kinds)
    reserved = {0, 2, EXIT_OS, EXIT_INTERRUPTED, EXIT_TERMINATED}
    assert not reserved & {kind.exit_code for kind in kinds}


def test_error_page_lists_every_class_with_its_code_and_remedy() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    remedies = dict(re.findall(r"^\| (\d+ \| `\w+`) \|.*\| ([^|]+) \|$", page, re.MULTILINE))
    said = {
        f"{kind.exit_code} | `{kind.__name__}`": kind.default_remedy for kind in error_classes()
    }
    assert {name: remedies.get(name, "").replace("`", "") for name in said} == {
        name: remedy.replace("`", "") for name, remedy in said.items()
    }


def test_heading_of_the_errors_draws_the_tree_as_it_is() -> None:
    text = " ".join(str(errors.__doc__).split())
    missing = [
        kind.__name__ for kind in error_classes() if f"{kind.__name__} {kind.exit_code}" not in text
    ]
    assert not missing


# Words that say nothing alone: an error names the value, shape, number or state that was found.
VAGUE = {
    "another",
    "others",
    "other",
    "none",
    "both",
    "neither",
    "something else",
    "one",
    "some",
    "nothing",
}


def texts_of(node: ast.AST | None) -> Iterator[str]:
    """Yield the constant texts that an expression may have as its value."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*texts_of(body), *texts_of(orelse))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in texts_of(value))


def error_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each constant text that is given as `expected` or `got`, or assigned to a variable of this name."""
    for node in ast.walk(parsed(path)):
        pairs: list[tuple[str | None, ast.AST]] = []
        match node:
            case ast.keyword(arg=name, value=value):
                pairs = [(name, value)]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pairs = [(name, value)]
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = [
                    (one.id, value)
                    for one, value in zip(names, values, strict=False)
                    if isinstance(one, ast.Name)
                ]
        for word, said in pairs:
            if word in ("expected", "got"):
                yield from ((getattr(said, "lineno", 0), text) for text in texts_of(said))


def test_errors_say_what_was_expected_and_found_not_only_another_or_none() -> None:
    violations = {
        f"{name(path)}:{line}: {text!r}"
        for path in SOURCES
        for line, text in error_texts(path)
        if text.strip(" .,").lower() in VAGUE
    }
    assert not violations


def test_control_vague_errors_are_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        'got = "none" if x else str(x)\nf(a, expected=x or "Others", got="3 of 4")\n', "utf-8"
    )
    assert [text for _, text in error_texts(source) if text.lower() in VAGUE] == ["none", "Others"]


def test_first_line_of_a_module_is_a_statement_not_a_question() -> None:
    first_lines = {name(path): (ast.get_docstring(parsed(path)) or "") for path in SOURCES}
    violations = {path for path, text in first_lines.items() if "?" in text.partition("\n")[0]}
    assert not violations
