"""The command `ddm evaluate`: draw samples from a verified release, or read them, and measure them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.editing_options import read_interval
from ddm.cli.evaluated_conditions import (
    EvaluatedConditions,
    ReferenceConditionOptions,
    conditions_for,
    select_class,
)
from ddm.cli.options import (
    HOW,
    WHAT,
    MachineOptions,
    ModelArgument,
    ModelVerification,
    SolverOptions,
    check_null,
    grouped,
    is_student,
    read_memory,
    refuse_options_of_release,
    warn_if_expired,
)
from ddm.cli.settings import DrawingSettings, read_settings, set_option
from ddm.cli.strategy_options import (
    FLAGS,
    StrategyOptions,
    choose_strategy,
    read_priors,
)
from ddm.errors import SetupError
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.sampling.strategies import STRATEGIES
from ddm.system.console import progress, say, table
from ddm.system.progress import ProgressCallback

if TYPE_CHECKING:
    from ddm.cli.evaluated_models import EvaluatedModel
    from ddm.cli.evaluated_samples import SampleSet
    from ddm.evaluation.features import Features
    from ddm.evaluation.measuring import Yardstick
    from ddm.evaluation.page import EvaluatedSamples
    from ddm.evaluation.reference import Reference
    from ddm.protocol.architecture import Condition
    from ddm.sampling.strategies import Strategy

COMPARE = "What to compare with"

ShowProgress = Callable[[str], AbstractContextManager[ProgressCallback]]
"""Called with a label; shows the progress of what is done in the context."""

NumSamplesOption = Annotated[
    int | None,
    typer.Option(
        "--num",
        min=8,
        help="Number of samples; with --samples, only the first ones of the file.",
        rich_help_panel=WHAT,
    ),
]
SamplesFileOption = Annotated[
    Path | None,
    typer.Option(
        "--samples",
        metavar="FILE",
        help="Evaluate this npz from ddm sample instead of drawing samples.",
        rich_help_panel=WHAT,
    ),
]
PageFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Folder for a page with pictures.", rich_help_panel=WHAT
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, for scripts.", rich_help_panel=WHAT)
]
ReferenceOption = Annotated[
    Path,
    typer.Option(
        "--reference",
        metavar="PATH",
        help="npz of real images, or pictures if the plan has a transform.",
        rich_help_panel=COMPARE,
    ),
]
HoldoutOption = Annotated[
    Path | None,
    typer.Option(
        "--holdout",
        metavar="PATH",
        help="Other real images, which set the scale for near copies.",
        rich_help_panel=COMPARE,
    ),
]
GroupColumnOption = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="NAME",
        help="Column of the reference that groups its images.",
        rich_help_panel=COMPARE,
    ),
]
FeaturesOption = Annotated[
    str,
    typer.Option(
        "--features",
        help="Features: encoder, timm:NAME=FILE, clip:FOLDER, or a classifier's FILE.",
        rich_help_panel=COMPARE,
    ),
]
NeighboursOption = Annotated[
    int,
    typer.Option(
        "--neighbours",
        min=1,
        max=100,
        help="Number of neighbours (k) in precision and recall.",
        rich_help_panel=COMPARE,
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        help="Strategy by which experts are chosen in each step; repeatable.",
        rich_help_panel=HOW,
    ),
]
SetOption = Annotated[list[str] | None, set_option(DrawingSettings)]


@dataclass(frozen=True)
class EvaluationReference:
    """What samples are compared with.

    Attributes:
        reference: real images.
        holdout: other real images, the scale for copies; None without them.
        features: the network that sees them.
        neighbours: k of precision, recall and so on.
    """

    reference: "Reference"
    holdout: "Reference | None"
    features: "Features"
    neighbours: int

    @property
    def num_images(self) -> int:
        """The number of real images."""
        if self.holdout is None:
            return self.reference.num
        return self.reference.num + self.holdout.num

    @property
    def num_bytes(self) -> int:
        """The bytes of the real images."""
        if self.holdout is None:
            return self.reference.num_bytes
        return self.reference.num_bytes + self.holdout.num_bytes


@dataclass(frozen=True)
class EvaluatedOptions:
    """Which samples are evaluated: how many are drawn, or the file that holds them.

    Raises:
        SetupError: neither.
    """

    num: NumSamplesOption = None
    samples: SamplesFileOption = None

    def __post_init__(self) -> None:
        if self.num is None and self.samples is None:
            raise SetupError(
                "--num",
                expected="--num or --samples",
                got="neither a number of samples nor a file of them",
                remedy="Add --num N to draw N samples, or --samples FILE for those that are there.",
            )


@dataclass(frozen=True)
class OutputOptions:
    """In which form the figures are given."""

    as_json: JsonOption = False
    out: PageFolderOption = None


@dataclass(frozen=True)
class ComparisonOptions:
    """What samples are compared with, and by which features."""

    reference: ReferenceOption
    holdout: HoldoutOption = None
    by: GroupColumnOption = None
    features: FeaturesOption = "encoder"
    neighbours: NeighboursOption = 5


@dataclass(frozen=True)
class EvaluatedDrawingOptions:
    """How samples are drawn, with each strategy."""

    strategy: StrategiesOption = None
    following: StrategyOptions = StrategyOptions()
    solving: SolverOptions = SolverOptions()
    settings: SetOption = None


@grouped
def evaluate(
    source: ModelArgument,
    *,
    evaluated: EvaluatedOptions,
    conditioning: ReferenceConditionOptions,
    output: OutputOptions,
    compared: ComparisonOptions,
    drawing: EvaluatedDrawingOptions,
    verification: ModelVerification,
    machine: MachineOptions,
) -> None:
    """Measure samples against real images: FID, KID, precision, recall, shares, copies; verifies a release first."""
    # Everything that options alone can get wrong is refused before the release is read, which may take minutes.
    rare = read_settings(DrawingSettings, drawing.settings)
    samples = evaluated.samples
    solving = drawing.solving
    guidance = conditioning.guidance
    guidance_interval = read_interval(rare.guidance_interval)
    strategy_settings = drawing.following.settings(rare)
    if samples is not None:
        unused_options = {
            "--strategy": drawing.strategy,
            **{FLAGS[name]: name for name in strategy_settings},
            str(conditioning.flag): conditioning.flag,
            "--guidance": guidance,
        }
        _check_nothing_is_drawn(samples, unused_options)
    # Each strategy once, in the order in which they were given.
    names = list(dict.fromkeys(drawing.strategy or ["lock"]))
    strategies = _choose_strategies(names, strategy_settings)
    _prepare_page_folder(output.out)

    if is_student(source):
        _check_student(source, verification, drawing, strategy_settings, rare)

    from ddm.cli.evaluated_models import EvaluatedModel, StudentDrawing
    from ddm.cli.evaluated_samples import EvaluationDrawing, read_samples
    from ddm.cli.sampling import ComputeSettings
    from ddm.system.memory import memory_limit

    computing = ComputeSettings(machine.device, machine.arithmetic(), rare.batch)
    limit = memory_limit(read_memory(machine.memory))
    opened = None
    student = None
    declared_shares = None
    if is_student(source):
        from ddm.distillation.student import read_record

        student = read_record(source)
        model = EvaluatedModel.of_student(student)
        weights = [1.0]
    else:
        opened = verification.of_release().open(source, experts_later=True)
        model = EvaluatedModel.of_release(opened)
        weights, declared_shares = read_priors(
            opened.manifest, drawing.following.prior, rare.class_prior
        )
    comparison = _open_comparison(compared, model)

    given_samples = None
    num_samples = evaluated.num or 0
    if samples is not None:
        given_samples = read_samples(model.data, len(model.owners), samples, evaluated.num)
        num_samples = len(given_samples.images)
    needed = _comparing_bytes(model, comparison, num_samples)
    if given_samples is None:
        needed += _conditions_bytes(model, num_samples, conditioning.text_encoder)
    limit.check(
        "memory",
        # The samples themselves are float32.
        needed + 4 * num_samples * model.data.dim,
        "Evaluate fewer images, or raise the limit with --memory.",
    )

    show_progress = partial(_show_progress, as_json=output.as_json)
    condition_words = None
    if given_samples is not None:
        sample_sets = [given_samples]
        # Nobody knows how the samples of a file were drawn; they are compared with the shares of --prior.
        due_shares = weights
    else:
        conditions = conditions_for(
            conditioning,
            model.condition,
            comparison.reference,
            num_samples,
            solving.seed,
            counted=declared_shares is not None or model.counts_classes,
        )
        _check_conditioned(conditions.value is not None, rare, guidance)
        if guidance:
            check_null(model.condition, "--guidance", "Leave --guidance out.")
        condition_words = conditions.words
        comparison = _compare_with_class(comparison, conditions, model.condition)
        how = {
            "steps": solving.steps,
            "solver": solving.solver.value,
            "prior": weights,
            "condition": conditions.value,
            "guidance": guidance or 0.0,
            "guidance_interval": guidance_interval,
            "router_every": rare.router_every or 1,
        }
        num_processes = min(machine.processes, num_samples)
        due_shares = weights
        if student is not None:
            student_drawing = StudentDrawing(
                student, Path(source), computing, num_processes, solving.seed, how
            )
            sample_sets = [student_drawing.draw(num_samples, limit, needed, show_progress)]
        elif opened is not None:
            evaluation_drawing = EvaluationDrawing(
                opened, computing, num_processes, solving.seed, how, declared_shares
            )
            sample_sets, due_shares = evaluation_drawing.draw(
                strategies, num_samples, limit, needed, show_progress
            )

    # Features of the real images are computed once, for all sets of samples.
    yardstick = _make_yardstick(comparison, solving.seed, show_progress)
    results = _measure(sample_sets, yardstick, model, due_shares, show_progress)

    sampling = None
    if condition_words is not None:
        sampling = {
            "steps": solving.steps,
            "solver": solving.solver.value,
            "conditions": condition_words,
            "guidance": guidance or 0.0,
        }
    origin = _origin(model, comparison, solving.seed, sampling, samples)
    document = _document(results, origin)
    out = output.out
    if out is not None:
        _write_page(out, document, results, yardstick, model)
    # Nothing but the document, which other programs parse.
    if output.as_json:
        say(json.dumps(document, indent=2))
    else:
        say(_tables(results, comparison.features))
        if sampling is not None and not isinstance(model.condition, NoCondition):
            say(f"\nThe samples were drawn {condition_words}, with guidance {guidance or 0:g}.")
        if out is not None:
            say(f"\nThe page: {out / 'index.html'}; the figures: {out / 'evaluation.json'}.")
            say(
                "The page shows images of the reference, and only you can read it; the figures show none."
            )
    if opened is not None:
        warn_if_expired(opened)


def _check_student(
    source: str,
    verification: ModelVerification,
    drawing: EvaluatedDrawingOptions,
    strategy_settings: dict[str, Any],
    rare: DrawingSettings,
) -> None:
    """Refuse options of a release, its silos and its router, none of which a student has."""
    refuse_options_of_release(
        source,
        {
            "--root": verification.root,
            "--strategy": drawing.strategy,
            **{FLAGS[name]: name for name in strategy_settings},
            "--prior": drawing.following.prior != "data",
            "--set class-prior": rare.class_prior != "data",
            "--set router-every": rare.router_every,
        },
    )


def _prepare_page_folder(out: Path | None) -> None:
    """Refuse a page folder that cannot be written.

    Raises:
        SetupError: a name of a file.
    """
    if out is None:
        return
    from ddm.io.pictures import prepare_output

    if out.suffix:
        raise SetupError("--out", expected="a folder, by a name without ending", got=out.name)
    prepare_output(out)


def _open_comparison(options: ComparisonOptions, model: "EvaluatedModel") -> EvaluationReference:
    from ddm.evaluation.features import open_features
    from ddm.evaluation.reference import open_reference

    # Decoding and transforming pictures takes a while, without a progress bar.
    if model.transform:
        say("reading the images to compare with", error=True)
    reference = open_reference(options.reference, model.data, options.by, model.transform)
    holdout = None
    if options.holdout is not None:
        holdout = open_reference(options.holdout, model.data, None, model.transform)
    features = open_features(options.features, model.data, model.open_encoder)
    return EvaluationReference(reference, holdout, features, options.neighbours)


def _comparing_bytes(
    model: "EvaluatedModel", comparison: EvaluationReference, num_samples: int
) -> int:
    """Return the bytes of the real images and of computing the figures."""
    from ddm.evaluation.copies import num_pixel_values
    from ddm.evaluation.metrics import metrics_bytes

    # Copies are looked for among pixels, which large images have fewer of after averaging.
    num_pixels = num_pixel_values(model.data.shape)
    figures = metrics_bytes(num_samples, comparison.num_images, comparison.features.dim, num_pixels)
    return comparison.num_bytes + figures


def _conditions_bytes(model: "EvaluatedModel", num_samples: int, text_encoder: Path | None) -> int:
    """Return the bytes of the conditions of samples that are drawn here, and of the encoder of texts."""
    from ddm.footprint import condition_bytes, labels_bytes

    num_bytes = 2 * labels_bytes(model.condition, num_samples)
    if text_encoder is not None:
        num_bytes += condition_bytes(model.condition)
    return num_bytes


def _compare_with_class(
    comparison: EvaluationReference, conditions: "EvaluatedConditions", condition: "Condition"
) -> EvaluationReference:
    """Return the comparison with real images of the samples' class alone, where all samples are of one."""
    label = conditions.value
    if (
        conditions.compared_images is None
        or not isinstance(label, int)
        or not isinstance(condition, ClassCondition)
    ):
        return comparison
    holdout = comparison.holdout
    if holdout is not None:
        # Copies are judged by images of the same class as well, since other classes are further away from any sample.
        holdout = select_class(label, condition, holdout)
    reference = comparison.reference.select(conditions.compared_images)
    return replace(comparison, reference=reference, holdout=holdout)


def _make_yardstick(
    comparison: EvaluationReference,
    seed: int,
    show_progress: ShowProgress,
) -> "Yardstick":
    from ddm.evaluation.measuring import Yardstick

    with show_progress(f"comparing {comparison.reference.num} reference images") as advance:
        return Yardstick.of(
            comparison.reference,
            comparison.features,
            holdout=comparison.holdout,
            k=comparison.neighbours,
            seed=seed,
            on_progress=advance,
        )


def _measure(
    sample_sets: "Sequence[SampleSet]",
    yardstick: "Yardstick",
    model: "EvaluatedModel",
    due_shares: Sequence[float],
    show_progress: ShowProgress,
) -> "list[EvaluatedSamples]":
    """Measure every set of samples; each silo is due the shares of its experts together."""
    from ddm.evaluation.origins import SampleOrigins
    from ddm.evaluation.page import EvaluatedSamples

    silos = model.silos
    silo_priors = dict.fromkeys(silos, 0.0)
    # A student has no owners, and one share.
    for owner, share in zip(model.owners, due_shares, strict=bool(silos)):
        silo_priors[owner] += share
    results = []
    for sample_set in sample_sets:
        silo_N = sample_set.silo_N(model.owners, silos)
        origins = None
        if silo_N is not None:
            origins = SampleOrigins(silo_N, silos, list(silo_priors.values()))
        label_text = f"comparing {len(sample_set.images)} samples, {sample_set.name}"
        with show_progress(label_text) as advance:
            evaluation = yardstick.judge(sample_set.images, origins, on_progress=advance)
        notes = (*sample_set.notes, *evaluation.notes)
        evaluation = replace(evaluation, notes=notes)
        results.append(EvaluatedSamples(sample_set.name, sample_set.images, silo_N, evaluation))
    return results


def _check_nothing_is_drawn(samples: Path, options: dict[str, Any]) -> None:
    """Refuse options that say how samples are drawn."""
    # Options that would change nothing are an error, or their user would believe that they had.
    for flag, value in options.items():
        if value is not None and value != []:
            raise SetupError(
                flag, expected=f"either {flag} or --samples", got=f"both, with --samples {samples}"
            )


def _check_conditioned(has_condition: bool, rare: DrawingSettings, guidance: float | None) -> None:
    """Refuse options that change nothing where samples have no condition."""
    options = {
        "--guidance": guidance,
        "--set class-prior": None if rare.class_prior == "data" else rare.class_prior,
    }
    for flag, value in options.items():
        if value is not None and not has_condition:
            raise SetupError(
                flag,
                expected="samples with a class or a text",
                got=f"{value!r} with samples without a condition",
            )
    if rare.guidance_interval is not None and not guidance:
        raise SetupError(
            "--set guidance-interval",
            expected="--guidance as well",
            got="an interval without guidance",
        )


@contextmanager
def _show_progress(label: str, as_json: bool) -> Iterator[ProgressCallback]:
    """Show progress; beside JSON, which has standard output to itself, only a line on standard error."""
    if as_json:
        say(label, error=True)
        yield lambda done, total: None
        return
    with progress(label) as advance:
        yield advance


def _choose_strategies(names: list[str], settings: dict[str, Any]) -> "dict[str, Strategy]":
    """Build each strategy with the settings that are its own; a setting that none of them has is refused."""
    for setting, value in settings.items():
        if not any(setting in STRATEGIES[name].settings for name in names):
            # This raises the error that names the strategy with this setting.
            choose_strategy(names[0], {setting: value})
    strategies = {}
    for name in names:
        own_settings = {key: settings[key] for key in settings if key in STRATEGIES[name].settings}
        strategies[name] = choose_strategy(name, own_settings)
    return strategies


def _origin(
    model: "EvaluatedModel",
    comparison: EvaluationReference,
    seed: int,
    sampling: dict[str, Any] | None,
    samples: Path | None,
) -> dict[str, Any]:
    """Return what the figures follow from: run with the same, they are the same."""
    from ddm.evaluation.intervals import LEVEL
    from ddm.protocol.base import sha256_file

    features = comparison.features
    reference = comparison.reference
    holdout = comparison.holdout
    return {
        **model.origin,
        "features": {"name": features.name, "dim": features.dim, "digest": features.digest},
        "reference": {
            "num": reference.num,
            "digest": reference.digest,
            "groups": reference.group_name,
        },
        "holdout": holdout and {"num": holdout.num, "digest": holdout.digest},
        "sampling": sampling,
        "samples": samples and {"digest": sha256_file(samples)},
        "seed": seed,
        "neighbours": comparison.neighbours,
        "confidence": LEVEL,
    }


def _document(results: "list[EvaluatedSamples]", origin: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first strategy, those of further ones under `compared`, and their origin."""
    first, *others = [
        {"strategy": result.name, **result.evaluation.to_json()} for result in results
    ]
    return {**first, "compared": others, **origin}


def _tables(results: "list[EvaluatedSamples]", network: "Features") -> str:
    """Lay the figures out for a terminal."""
    from ddm.evaluation.tables import tables

    named = [(result.name, result.evaluation) for result in results]
    return tables(named, network, table)


def _write_page(
    out: Path,
    document: dict[str, Any],
    results: "list[EvaluatedSamples]",
    yardstick: "Yardstick",
    model: "EvaluatedModel",
) -> None:
    from ddm.evaluation.page import write_page

    write_page(out, document, results, yardstick.reference, model.silos, model.data.range)
