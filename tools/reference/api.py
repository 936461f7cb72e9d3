"""docs/reference/api.md: the public names, from their signatures and docstrings as they stand in the source."""

import ast
import re
from collections.abc import Iterator

import ddm
from tools.reference.docstring import Docstring, parse
from tools.reference.source import Function, Module, code, field, is_public, parameters

HEAD = """\
# The Python API

`make docs` writes this page from the code. The names on this page are public: they change only with a new
[version](../../RELEASE.md#versions) and a line in the changelog. Everything else may change at any time. `import ddm`
does not import torch; a name in `ddm` imports what it needs when it is first used. [Another page](errors.md) lists
errors and exit codes.
"""
GROUPS: dict[str, tuple[str, ...]] = {
    "Open and sample": (
        "ddm.loading.ensemble.open_ensemble",
        "ddm.ensemble.Ensemble",
        "ddm.sampling.options.SamplingOptions",
        "ddm.sampling.samples.Samples",
        "ddm.sampling.provenance.Provenance",
        "ddm.sampling.trajectories.Callback",
        "ddm.sampling.inpainting.KnownRegion",
        "ddm.diffusion.solver.SolverName",
        "ddm.diffusion.solver.Solver",
        "ddm.diffusion.path.as_velocity",
        "ddm.io.pictures.grid",
        "ddm.distillation.student.load_student",
        "ddm.encoders.text.TextEncoder",
        "ddm.encoders.autoencoder.Latent",
    ),
    "Evaluate": (
        "ddm.evaluation.measuring.evaluate",
        "ddm.evaluation.measuring.Evaluation",
        "ddm.evaluation.intervals.Estimate",
        "ddm.sampling.likelihood.LikelihoodOptions",
        "ddm.sampling.likelihood.Likelihood",
    ),
    "Strategies": (
        "ddm.sampling.strategies.Strategy",
        "ddm.sampling.strategies.StepRule",
        "ddm.sampling.strategies.strategy_named",
        *(
            f"ddm.sampling.strategies.{name}"
            for name in ("Full", "Sample", "Lock", "TopK", "TopOne", "Nucleus")
        ),
        "ddm.sampling.strategies.Threshold",
    ),
    "Routers": (
        "ddm.routers.base.Router",
        "ddm.routers.classifier.ClassifierRouter",
    ),
    "Verify": (
        "ddm.loading.release.open_release",
        "ddm.loading.release.Release",
        "ddm.trust.verify.VerifiedRelease",
    ),
    "Documents": (
        "ddm.protocol.base.Document",
        "ddm.protocol.plan.Plan",
        "ddm.protocol.submission.Submission",
        "ddm.protocol.manifest.Manifest",
    ),
    "Training": (
        "ddm.training.config.Engine",
        "ddm.training.loop.train",
        "ddm.training.private.make_private",
        "ddm.distillation.distill.distill",
        "ddm.distillation.dataset.DistillationData",
        "ddm.training.loop.TrainingRun",
        "ddm.training.loop.FinishedTraining",
        "ddm.training.batches.Examples",
        "ddm.training.objective.TrainingObjective",
    ),
}
REMARKS = {
    "Documents": "Frozen pydantic models; [Documents](documents.md) says what each field means, at every depth.",
    "Training": "The table `[training]` of `silo.toml`, which is also an argument of the library's training functions.",
}
HEADINGS = {"Args": "Arguments"}
WITHOUT_METHODS = {*GROUPS["Strategies"]}  # how an ensemble asks them is its own affair
MODELS = ("Document", "Model", "Settings")
NAMED = re.compile(r"[A-Za-z_]\w*(, [A-Za-z_]\w*)*")


def api_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(line for group in GROUPS for line in section(group))])


def section(group: str) -> Iterator[str]:
    """Yield the lines of one group of names."""
    yield f"## {group}\n"
    if group in REMARKS:
        yield f"{REMARKS[group]}\n"
    for full in GROUPS[group]:
        home, _, name = full.rpartition(".")
        module = Module.named(home)
        shown = f"ddm.{name}" if name in ddm.__all__ else full
        node = module.find(name)
        if isinstance(node, ast.ClassDef):
            yield from class_lines(module, node, shown)
        elif isinstance(node, Function):
            yield from function_lines(module, node, f"### `{shown}`")
        elif isinstance(node, ast.Assign):
            yield f"### `{shown}`\n\n```python\n{name} = {module.text(node.value)}\n```\n"
            if docstring := module.docstring_below(node):
                yield from described(parse(docstring))


def class_lines(module: Module, node: ast.ClassDef, shown: str) -> Iterator[str]:
    """Yield a class: how it is made, its fields, its public methods and properties."""
    doc = parse(ast.get_docstring(node))
    yield f"### `{shown}`\n"
    fields = [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign) and is_public(ast.unparse(each.target))
    ]
    made = next(
        (each for each in node.body if isinstance(each, Function) and each.name == "__init__"), None
    )
    is_model = any(ast.unparse(base) in MODELS for base in node.bases)
    if made:
        yield code(node.name, parameters(module, made.args), "")
    elif fields and not is_model:
        yield code(node.name, [field(module, each) for each in fields], "")
    yield from described(doc, skip=("Attributes",) if is_model else ())
    if fields and is_model:
        yield "| field | type | default | meaning |\n| --- | --- | --- | --- |"
        yield from (row(module, each, doc) for each in fields)
        yield ""
    for each in node.body:
        if shown in WITHOUT_METHODS or not isinstance(each, Function):
            continue
        # A protocol with __call__ is implemented by a function, whose signature readers need.
        if is_public(each.name) or each.name == "__call__":
            yield from function_lines(module, each, f"#### `{node.name}.{each.name}`")


def function_lines(module: Module, node: Function, heading: str) -> Iterator[str]:
    """Yield a function, a method or a property."""
    decorators = {ast.unparse(each) for each in node.decorator_list}
    yield f"{heading}\n"
    answer = f" -> {module.annotation(node.returns)}" if node.returns else ""
    if "property" in decorators:
        yield f"```python\n{node.name}{answer.replace(' -> ', ': ')}  # property\n```\n"
    else:
        yield code(node.name, parameters(module, node.args), answer)
    yield from described(parse(ast.get_docstring(node)))


def row(module: Module, node: ast.AnnAssign, doc: Docstring) -> str:
    """Return one line of the table of a model's fields."""
    name = ast.unparse(node.target)
    default = f"`{module.text(node.value)}`" if node.value else "required"
    cells = (
        f"`{name}`",
        f"`{module.annotation(node.annotation)}`",
        default,
        doc.entries("Attributes").get(name, ""),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def described(doc: Docstring, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the text of a docstring, then its sections as lists."""
    yield "\n\n".join(example_as_code(part) for part in doc.text.split("\n\n")) + "\n"
    for name, paragraphs in doc.sections.items():
        if name not in skip:
            yield f"{HEADINGS.get(name, name)}:\n"
            yield "\n".join(f"- {marked(paragraph)}" for paragraph in paragraphs) + "\n"


def example_as_code(part: str) -> str:
    """Return a paragraph, in a block of code where it is an example that doctest runs."""
    return f"```pycon\n{part}\n```" if part.startswith(">>> ") else part


def marked(paragraph: str) -> str:
    """Return an entry with its names as code."""
    names, colon, text = paragraph.partition(": ")
    if not colon or not NAMED.fullmatch(names):
        return paragraph
    return f"{', '.join(f'`{name}`' for name in names.split(', '))}: {text}"
