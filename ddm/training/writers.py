"""Writers of learning curves for programs that show many of them: TensorBoard, Weights & Biases.

For one owner's islands and for Python: no silo uses a writer, since some of them talk to a server. Another program
needs a class with the two methods of `ddm.training.metrics.MetricsWriter`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never, cast, get_args

from ddm.errors import SetupError

if TYPE_CHECKING:
    from ddm.training.metrics import MetricsWriter

WriterKind = Literal["tensorboard", "wandb"]


@dataclass(frozen=True)
class WriterChoice:
    """Where learning curves go, as `ddm train --log` names it.

    Attributes:
        kind: the program that shows them.
        target: a folder for TensorBoard, a project for Weights & Biases.
    """

    kind: WriterKind
    target: str


def parse_writer(text: str, folder: Path) -> WriterChoice:
    """Parse `WRITER[:TARGET]`.

    Args:
        text: as it was typed.
        folder: the folder of the islands, from which the default target follows.

    Raises:
        SetupError: there is no such writer.
    """
    name, _, target = text.partition(":")
    kinds = get_args(WriterKind)
    if name not in kinds:
        raise SetupError(
            "--log",
            expected=" or ".join(f"{kind}[:TARGET]" for kind in kinds),
            got=ascii(text[:100]),
            remedy="Name one of them, or leave --log out: the curve is in metrics.jsonl in any case.",
        )
    kind = cast(WriterKind, name)
    if not target and kind == "tensorboard":
        target = str(folder / "tensorboard")
    elif not target:
        target = folder.resolve().name
    return WriterChoice(kind, target)


def open_writer(choice: WriterChoice, name: str) -> "MetricsWriter":
    """Open a writer for one training.

    Args:
        choice: the program and its target.
        name: the name of the training among others of the same target.

    Raises:
        SetupError: the program's library is not installed.
    """
    match choice.kind:
        case "tensorboard":
            return TensorBoardWriter(Path(choice.target) / name)
        case "wandb":
            return WandbWriter(choice.target, name)
        case _:
            assert_never(choice.kind)


class TensorBoardWriter:
    """Writes event files for TensorBoard, which opens no connection.

    Args:
        folder: the folder of one training. Where an earlier process wrote a curve to it, the new one takes its place.

    Raises:
        SetupError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SetupError(
                "--log tensorboard",
                expected="the package tensorboard",
                got="an installation without it",
                remedy="Install it: in Archipelago's repository, pip install '.[tensorboard]'.",
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricsWriter.write`."""
        if self._writer is None:
            # TensorBoard then hides what an earlier process wrote at this step and later.
            self._writer = self._make(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(f"training/{name}", value, step)

    def close(self) -> None:
        """See `MetricsWriter.close`."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """Writes a run of Weights & Biases, which goes to its server unless WANDB_MODE is `offline`: the curve alone.

    Args:
        project: the project of the runs.
        name: the name of the run.

    Raises:
        SetupError: the library is not installed.
    """

    def __init__(self, project: str, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SetupError(
                "--log wandb",
                expected="the package wandb",
                got="an installation without it",
                remedy="Install it: pip install wandb.",
            ) from error
        self._init = wandb.init
        # By itself the library also sends the machine's name and devices, the command line with its paths, the address
        # of a git repository, the packages that are installed, and all that the command prints.
        self._settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._project = project
        self._name = name
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricsWriter.write`."""
        if self._run is None:
            # Only now: a training that does not begin leaves no empty run.
            self._run = self._init(project=self._project, name=self._name, settings=self._settings)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `MetricsWriter.close`."""
        if self._run is not None:
            self._run.finish()
