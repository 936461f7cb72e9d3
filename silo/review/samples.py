"""Draws a few samples of each expert that would leave, in this process, which opens no connection."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ddm.diffusion.path import path_named
from ddm.ensemble import Ensemble
from ddm.errors import ArchipelagoError
from ddm.loading.ensemble import on_path
from ddm.loading.plan import PlanFiles
from ddm.models import count_flops, load_expert
from ddm.pages.pictures import inline
from ddm.protocol.architecture import ClassCondition
from ddm.protocol.submission import SubmittedExpert
from silo.config import Site
from silo.review.facts import Facts
from silo.worker.approval import review_folder

MOST_SHOWN, MOST_EXPERTS, STEPS, AT_ONCE = 16, 8, 24, 4
MOST_FLOPS = 4e12  # of all samples of one expert: about two minutes on two cores


@dataclass(frozen=True)
class SampleSheet:
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
class SampleSheets:
    """The samples of all experts, drawn one after the other in a thread of its own, which ends with the process."""

    site: Site
    facts: Facts
    _sheets: dict[str, SampleSheet] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        num, words = _effort(self.facts)
        for expert in self.facts.draft.experts[:MOST_EXPERTS]:
            problem = (
                ""
                if num
                else "one sample would take minutes: draw them with `ddm sample` once it is published"
            )
            self._sheets[expert.expert_id] = SampleSheet(
                expert.expert_id, num, words, problem=problem
            )

    def start(self) -> None:
        """Begin to draw."""
        threading.Thread(target=self._draw, name="samples", daemon=True).start()

    def end(self) -> None:
        """Draw no more."""
        self._ended.set()

    @property
    def sheets(self) -> tuple[SampleSheet, ...]:
        """What is drawn by now."""
        return tuple(self._sheets.values())

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return all(sheet.problem or len(sheet.pictures) >= sheet.num for sheet in self.sheets)

    def _draw(self) -> None:
        torch.set_num_threads(self.site.settings().threads)
        for expert in self.facts.draft.experts[:MOST_EXPERTS]:
            sheet = self._sheets[expert.expert_id]
            if sheet.problem:
                continue
            try:
                draw = _drawer(self.site, self.facts, expert)
                for first in range(0, sheet.num, AT_ONCE):
                    if self._ended.is_set():
                        return
                    pictures = (*sheet.pictures, *draw(first, min(AT_ONCE, sheet.num - first)))
                    sheet = self._keep(
                        SampleSheet(sheet.expert_id, sheet.num, sheet.words, pictures)
                    )
            except (ArchipelagoError, RuntimeError, MemoryError, OSError) as error:
                problem = (
                    str(error) if isinstance(error, ArchipelagoError) else type(error).__name__
                )
                self._keep(
                    SampleSheet(
                        sheet.expert_id,
                        sheet.num,
                        sheet.words,
                        sheet.pictures,
                        f"not drawn: {problem}",
                    )
                )

    def _keep(self, sheet: SampleSheet) -> SampleSheet:
        if sheet.num and not sheet.pictures and not sheet.problem:
            sheet = SampleSheet(
                sheet.expert_id,
                sheet.num,
                sheet.words,
                problem="neither grey nor colour: not shown",
            )
        self._sheets[sheet.expert_id] = sheet
        return sheet


def _effort(facts: Facts) -> tuple[int, str]:
    """Return how many samples of each expert are affordable, and under which condition they are drawn."""
    plan = facts.plan
    forward, _ = count_flops(plan.expert.architecture, plan.expert_shape, plan.condition)
    num = int(min(MOST_SHOWN, MOST_FLOPS // (2 * STEPS * max(forward, 1))))
    if isinstance(plan.condition, ClassCondition):
        return num, "classes in turn"
    return num, "" if plan.condition.kind == "none" else "without a text"


def _drawer(
    site: Site, facts: Facts, expert: SubmittedExpert
) -> Callable[[int, int], tuple[str, ...]]:
    """Load an expert; return what draws so many of its samples from a number on."""
    plan, silo_id = facts.plan, facts.draft.silo_id
    path = path_named(plan.objective.ensemble_path)
    network = load_expert(
        plan.expert.architecture,
        plan.expert_shape,
        review_folder(site),
        expert.file,
        plan.condition,
    )
    ensemble = Ensemble(
        [on_path(network, plan.objective.of(silo_id), path)],
        None,
        [1.0],
        plan.expert_shape,
        path=path,
        expert_ids=[expert.expert_id],
        condition=plan.condition,
        latent=PlanFiles.load_latent(plan, facts.accepted.folder),
    )
    classes = plan.condition.num_classes if isinstance(plan.condition, ClassCondition) else 0

    def draw(first: int, num: int) -> tuple[str, ...]:
        numbers = range(first, first + num)
        asked = torch.tensor([number % classes for number in numbers]) if classes else None
        share = [1.0] if classes else None
        drawn = ensemble.sample(
            num, steps=STEPS, numbers=numbers, condition=asked, condition_prior=share
        )
        return inline(drawn.images, plan.data.range)

    return draw
