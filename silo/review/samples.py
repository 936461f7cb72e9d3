"""Draws a few samples of each expert that would leave, in this process, which opens no connection."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ddm.diffusion.path import path_named
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import ArchipelagoError
from ddm.loading.ensemble import on_path
from ddm.loading.plan import PlanFiles
from ddm.models import count_flops, load_expert
from ddm.pages.pictures import inline
from ddm.protocol.architecture import ClassCondition
from ddm.protocol.submission import SubmittedExpert
from ddm.system.cores import default_threads
from silo.config import Site
from silo.review.facts import ReviewFacts
from silo.worker.approval import review_folder

MAX_SAMPLES = 16
MAX_EXPERTS = 8
STEPS = 24
SAMPLES_AT_ONCE = 4
# Of all samples of one expert: about two minutes on two cores.
MAX_FLOPS = 4e12


@dataclass(frozen=True)
class ExpertSheet:
    """Samples of one expert.

    Attributes:
        expert_id: its name.
        num: how many there will be.
        words: under which condition they are drawn.
        pictures: those that are drawn, as PNG in `data:` addresses.
        problem: why there are no more.
    """

    expert_id: str
    num: int
    words: str
    pictures: tuple[str, ...] = ()
    problem: str = ""


@dataclass
class ExpertSheets:
    """The samples of all experts, drawn one after the other in a thread of its own, which ends with the process."""

    site: Site
    facts: ReviewFacts
    _sheets: dict[str, ExpertSheet] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        num = _num_affordable_samples(self.facts)
        problem = ""
        if not num:
            problem = (
                "one sample would take minutes: draw them with `ddm sample` once it is published"
            )
        words = _condition_words(self.facts)
        for expert in self.facts.draft.experts[:MAX_EXPERTS]:
            sheet = ExpertSheet(expert.expert_id, num, words, problem=problem)
            self._sheets[expert.expert_id] = sheet

    def start(self) -> None:
        """Begin to draw."""
        # A daemon: anybody who ends the page need not wait for the sample that is being drawn.
        threading.Thread(target=self._draw, name="samples", daemon=True).start()

    def end(self) -> None:
        """Draw no more."""
        # The thread looks at this between two groups of samples, and then draws no further group.
        self._ended.set()

    @property
    def sheets(self) -> tuple[ExpertSheet, ...]:
        """What is drawn by now."""
        return tuple(self._sheets.values())

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes."""
        return all(sheet.problem or len(sheet.pictures) >= sheet.num for sheet in self.sheets)

    def _draw(self) -> None:
        settings = self.site.settings()
        torch.set_num_threads(settings.training.threads or default_threads())
        for expert in self.facts.draft.experts[:MAX_EXPERTS]:
            if self._sheets[expert.expert_id].problem:
                continue
            try:
                self._draw_expert(expert)
            except (ArchipelagoError, RuntimeError, MemoryError, OSError) as error:
                # Samples only help to judge: without them, the page still shows everything that leaves.
                reason = type(error).__name__
                if isinstance(error, ArchipelagoError):
                    reason = str(error)
                self._update(expert.expert_id, problem=f"not drawn: {reason}")

    def _draw_expert(self, expert: SubmittedExpert) -> None:
        """Draw samples of one expert until there are enough, or the page has ended."""
        draw = _load_drawer(self.site, self.facts, expert)
        num = self._sheets[expert.expert_id].num
        for first in range(0, num, SAMPLES_AT_ONCE):
            if self._ended.is_set():
                return
            new_pictures = draw(first, min(SAMPLES_AT_ONCE, num - first))
            pictures = (*self._sheets[expert.expert_id].pictures, *new_pictures)
            # Only images of one or three channels can be shown (`ddm.pages.pictures.inline`).
            if not pictures:
                self._update(expert.expert_id, problem="neither grey nor colour: not shown")
                return
            self._update(expert.expert_id, pictures=pictures)

    def _update(
        self,
        expert_id: str,
        *,
        pictures: tuple[str, ...] | None = None,
        problem: str = "",
    ) -> None:
        """Replace a sheet as a whole, since the page reads it from another thread."""
        sheet = self._sheets[expert_id]
        if pictures is None:
            pictures = sheet.pictures
        self._sheets[expert_id] = replace(sheet, pictures=pictures, problem=problem)


def _num_affordable_samples(facts: ReviewFacts) -> int:
    """Return how many samples of each expert are drawn; 0 where one alone costs too much."""
    plan = facts.plan
    forward_flops, _ = count_flops(plan.expert.architecture, plan.expert_shape, plan.condition)
    # A step of the solver evaluates the expert twice.
    sample_flops = 2 * STEPS * max(forward_flops, 1)
    return int(min(MAX_SAMPLES, MAX_FLOPS // sample_flops))


def _condition_words(facts: ReviewFacts) -> str:
    condition = facts.plan.condition
    if isinstance(condition, ClassCondition):
        return "classes in turn"
    if condition.kind == "none":
        return ""
    return "without a text"


def _load_drawer(
    site: Site,
    facts: ReviewFacts,
    expert: SubmittedExpert,
) -> Callable[[int, int], tuple[str, ...]]:
    """Load an expert; return what draws so many of its samples from a number on."""
    plan = facts.plan
    path = path_named(plan.objective.ensemble_path)
    network = load_expert(
        plan.expert.architecture,
        plan.expert_shape,
        review_folder(site),
        expert.file,
        plan.condition,
    )
    # An expert may have been trained on another path than that of the ensemble; readers see it on the ensemble's.
    velocity = on_path(network, plan.objective.of(facts.draft.silo_id), path)
    # An ensemble of this expert alone, without a router and with the whole weight.
    ensemble = Ensemble(
        [velocity],
        None,
        [1.0],
        plan.expert_shape,
        path=path,
        expert_ids=[expert.expert_id],
        condition=plan.condition,
        latent=PlanFiles.load_latent(plan, facts.accepted.folder),
    )
    num_classes = 0
    if isinstance(plan.condition, ClassCondition):
        num_classes = plan.condition.num_classes

    def draw(first: int, num: int) -> tuple[str, ...]:
        # A sample depends on its number alone, however many are drawn at once.
        numbers = range(first, first + num)
        classes = None
        condition_prior = None
        if num_classes:
            classes = torch.tensor([number % num_classes for number in numbers])
            condition_prior = [1.0]
        options = SamplingOptions(numbers=numbers, condition_prior=condition_prior)
        samples = ensemble.sample(num, steps=STEPS, condition=classes, options=options)
        return inline(samples.images, plan.data.range)

    return draw
