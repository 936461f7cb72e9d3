"""The folder of one owner's islands: where everything is, and the record of how the data set was divided."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DigestError, DocumentError, MissingFileError, SetupError
from ddm.io.files import read_bounded
from ddm.islands.seed import plan_from_seed
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Digest,
    Document,
    File,
    LocalText,
    Model,
    NaturalInt,
    NumImages,
    NumSteps,
    PlanId,
    ShortText,
    SiloId,
    Time,
    sha256_hex,
)
from ddm.protocol.learning import BASE_PATH, Training
from ddm.protocol.plan import Plan
from ddm.protocol.submission import ExpertTraining
from ddm.publishing.folder import ROOT_NAME, PublisherFolder
from ddm.training.job import JobFolder
from ddm.training.metrics import METRICS_NAME

SPLIT_NAME = "split.json"


class SplitIsland(Model):
    """One island: its name, its number of images, and the column's value that they share."""

    island_id: SiloId
    num_images: NumImages
    value: LocalText | None = None


class Split(Document):
    """How one owner's data set was divided.

    Attributes:
        plan_digest: the digest of the plan; where islands start from a seed, of the seed's plan, which theirs follows
            from.
        by: clusters of features, at random, or the values of a column.
        column: the column's name.
        data: the file's name.
        seed: the seed of the random division.
        training_from_seed: how each island is trained after the seed that all start from; null where there is none.
    """

    format: Literal["archipelago/split/1"] = "archipelago/split/1"
    plan_id: PlanId
    plan_digest: Digest
    created_at: Time
    by: Literal["clusters", "random", "column"]
    column: LocalText | None = None
    seed: NaturalInt
    name: ShortText
    data: LocalText
    cite: ShortText
    training_from_seed: Training | None = None
    islands: Annotated[tuple[SplitIsland, ...], Field(min_length=2, max_length=1024)]
    software: dict[ShortText, ShortText]


class TrainedIsland(Document):
    """The outcome of training one island, or the seed of all, written after the weights: with it, training has ended.

    Attributes:
        base: sha256 of the weights that training started from; null for random weights.
    """

    format: Literal["archipelago/trained-island/1"] = "archipelago/trained-island/1"
    plan_id: PlanId
    num_images: NumImages
    steps: NumSteps
    training: ExpertTraining
    expert: File
    base: Digest | None = None


@dataclass(frozen=True)
class TrainingFolder:
    """The folder of one training: of an island, or of the seed that islands start from."""

    path: Path

    @property
    def images(self) -> Path:
        """The images as the expert sees them; those of a seed until it is trained."""
        return self.path / "images.npy"

    @property
    def labels(self) -> Path:
        """The condition of each image, where the plan has one."""
        return self.path / "labels.npy"

    @property
    def record(self) -> Path:
        """See `TrainedIsland`."""
        return self.path / "trained.json"

    @property
    def metrics(self) -> Path:
        """The learning curve, once the training has ended; until then the job's folder has it."""
        return self.path / METRICS_NAME

    @property
    def job(self) -> JobFolder:
        """The training, until it has ended."""
        return JobFolder(self.path / "training")

    @property
    def is_trained(self) -> bool:
        """Whether the weights are there."""
        return self.record.is_file()


@dataclass(frozen=True)
class IslandFolder(TrainingFolder):
    """One island's own folder."""

    @property
    def rows(self) -> Path:
        """Which images of the data file these are."""
        return self.path / "rows.npy"

    @property
    def expert(self) -> Path:
        """The trained expert, averaged weights."""
        return self.path / "expert.safetensors"


@dataclass(frozen=True)
class SeedFolder(TrainingFolder):
    """The folder of the seed that islands start from. Its weights are a file of the islands' plan.

    Attributes:
        path: the folder.
        weights: the trained seed, averaged weights.
    """

    weights: Path

    @property
    def plan(self) -> Path:
        """The plan by which the seed is trained; nobody signs it."""
        return self.path / "plan.json"


class Islands(PublisherFolder):
    """The folder that `ddm split` makes."""

    @property
    def bundle(self) -> Path:
        """The folder that holds `plan.json` and the files of the plan."""
        return self.path / "plan"

    @property
    def router(self) -> Path:
        """The folder of what the router is made from."""
        return self.path / "router"

    @property
    def root(self) -> Path:
        """The root of trust, for those who open the releases."""
        return self.path / ROOT_NAME

    def island(self, number: int) -> IslandFolder:
        """Return the folder of an island."""
        return IslandFolder(self.path / "islands" / str(number))

    @property
    def start_from_seed(self) -> bool:
        """Whether the islands start from a seed."""
        return self.split.training_from_seed is not None

    @property
    def seed(self) -> SeedFolder:
        """The folder of the seed; it exists where islands start from one."""
        return SeedFolder(self.path / "seed", self.bundle / BASE_PATH)

    @cached_property
    def split(self) -> Split:
        """Read how the data set was divided.

        Raises:
            MissingFileError: not such a folder.
            SetupError: it was made by a version with another format.
        """
        # Written last by `ddm split`: a folder without it is none, or one that was cut short.
        if not (self.path / SPLIT_NAME).is_file():
            raise MissingFileError(
                str(self.path),
                expected=f"a folder with {SPLIT_NAME}",
                got="a folder without it" if self.path.is_dir() else "nothing there",
                remedy="Make one: `ddm split --data PATH --recipe plan.toml --islands K --out DIR`.",
            )
        try:
            return Split.parse(
                read_bounded(self.path / SPLIT_NAME, MAX_DOCUMENT_BYTES), subject=SPLIT_NAME
            )
        except DocumentError as error:
            raise SetupError(
                f"{self.path}, {error.subject}",
                expected="a folder made by this version of ddm split",
                got=error.got,
                remedy="Use the version that made it, or split the data set again.",
            ) from error

    @cached_property
    def plan(self) -> Plan:
        """Read the plan of the islands; where they start from a seed, it follows from the trained seed.

        Raises:
            DigestError: it is not the one that was split by, or the seed is not the one that was trained.
            SetupError: the seed is not trained yet.
        """
        if self.split.training_from_seed is None:
            return self._read_plan(self.bundle / "plan.json")
        return plan_from_seed(self.seed_plan, self.split.training_from_seed, self.trained_seed())

    @cached_property
    def seed_plan(self) -> Plan:
        """Read the plan by which the seed is trained.

        Raises:
            DigestError: it is not the one that was split by.
        """
        return self._read_plan(self.seed.plan)

    def _read_plan(self, path: Path) -> Plan:
        data = read_bounded(path, MAX_DOCUMENT_BYTES)
        # Experts that were trained for another plan would be signed for this one.
        digest = sha256_hex(data)
        if digest != self.split.plan_digest:
            raise DigestError(
                f"{path.parent.name}/{path.name}",
                expected=f"sha256 {self.split.plan_digest[:16]}...",
                got=f"sha256 {digest[:16]}...",
                remedy="Copy the folder again from where it was split.",
            )
        return Plan.parse(data, subject="plan.json")

    def trained_seed(self) -> TrainedIsland:
        """Read the seed's record, whose weights must be there as they were written.

        Raises:
            SetupError: it is not trained yet.
            DigestError: the weights are another file.
        """
        folder = self.seed
        if not folder.is_trained:
            raise SetupError(
                "the seed that all islands start from",
                expected="one that is trained",
                got=f"no {folder.path.name}/{folder.record.name}",
                remedy=f"Train it first: `ddm train {self.path} --seed-only`.",
            )
        record = TrainedIsland.parse(
            read_bounded(folder.record, MAX_DOCUMENT_BYTES),
            subject=f"{folder.path.name}/{folder.record.name}",
        )
        present = None
        if folder.weights.is_file():
            present = File.of(record.expert.path, folder.weights)
        if present != record.expert or record.plan_id != self.split.plan_id:
            raise DigestError(
                f"plan/{BASE_PATH}",
                expected=f"the weights that {folder.path.name}/{folder.record.name} describes",
                got="another file" if present else "no file",
                remedy=(
                    f"Copy the folders plan and {folder.path.name} again from where the seed was trained, or remove "
                    f"{folder.record.name} there and train it again."
                ),
            )
        return record

    def trained(self, number: int) -> TrainedIsland:
        """Read an island's record, whose expert must be there as it was written, from the plan's base.

        Raises:
            DigestError: the expert is another file, or training started from another base.
        """
        folder = self.island(number)
        record = TrainedIsland.parse(
            read_bounded(folder.record, MAX_DOCUMENT_BYTES), subject=folder.record.name
        )
        present = None
        if folder.expert.is_file():
            present = File.of(record.expert.path, folder.expert)
        # A record of another split may have been copied here with its island.
        if present != record.expert or record.plan_id != self.split.plan_id:
            raise DigestError(
                f"islands/{number}/{folder.expert.name}",
                expected="the expert that trained.json describes",
                got="another file" if present else "no file",
                remedy=f"Copy islands/{number} again, or remove trained.json there and train it again.",
            )
        base = None
        if self.plan.base is not None:
            base = self.plan.base.digest
        # The seed may have been trained again since.
        if record.base != base:
            raise DigestError(
                f"islands/{number}/{folder.expert.name}",
                expected=f"an expert that started from {_base_words(base)}",
                got=f"one that started from {_base_words(record.base)}",
                remedy=f"Remove trained.json in islands/{number} and train it again.",
            )
        return record


def _base_words(digest: str | None) -> str:
    if digest is None:
        return "random weights"
    return f"weights of sha256 {digest[:16]}"
