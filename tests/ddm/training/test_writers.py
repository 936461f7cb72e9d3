"""Writers of learning curves: event files that TensorBoard reads back, an offline run of W&B, and their refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.errors import SetupError
from ddm.training.writers import (
    TensorBoardWriter,
    WandbWriter,
    WriterChoice,
    open_writer,
    parse_writer,
)
from tests.support.case import case
from tests.support.errors import has_subject

ROOT = Path(__file__).parents[3]
WANDB_PROGRAM = """
from ddm.training.writers import WriterChoice, open_writer

writer = open_writer(WriterChoice("wandb", "islands"), "island-3")
writer.write(10, {"loss": 0.37890625})
writer.close()
"""


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read what TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_each_value_at_its_step(tmp_path: Path) -> None:
    writer = open_writer(WriterChoice("tensorboard", str(tmp_path)), "island-3")
    writer.write(10, {"loss": 0.5, "learning_rate": 0.25})
    writer.write(20, {"loss": 0.125, "learning_rate": 0.25})
    writer.close()
    assert scalars_of(tmp_path / "island-3") == {
        "training/loss": [(10, 0.5), (20, 0.125)],
        "training/learning_rate": [(10, 0.25), (20, 0.25)],
    }


def test_tensorboard_shows_the_curve_of_the_last_process_alone(tmp_path: Path) -> None:
    for losses in ((0.5, 0.4375, 0.4), (0.5, 0.25)):
        writer = TensorBoardWriter(tmp_path)
        for number, loss in enumerate(losses, start=1):
            writer.write(10 * number, {"loss": loss})
        writer.close()
    assert scalars_of(tmp_path) == {"training/loss": [(10, 0.5), (20, 0.25)]}


def test_training_that_does_not_begin_leaves_no_run(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "none")
    writer.close()
    assert not (tmp_path / "none").exists()


def wandb_run(folder: Path, program: str, *words: str) -> Path:
    """Let a program write an offline run of Weights & Biases; return the folder of what would go to the server."""
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{packages}"]
    subprocess.run([*install, "--constraint", f"{ROOT}/constraints.txt", "wandb"], check=True)
    settings = {"PYTHONPATH": f"{packages}", "WANDB_MODE": "offline", "WANDB_DIR": f"{folder}"}
    subprocess.run(
        [sys.executable, "-c", program, *words], check=True, cwd=ROOT, env=os.environ | settings
    )
    (records,) = folder.rglob("run-*.wandb")
    # The log of records holds each value as JSON text.
    assert b"0.37890625" in records.read_bytes()
    return records.parent


@pytest.mark.slow  # It installs wandb, which is no dependency.
def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    assert wandb_run(tmp_path, WANDB_PROGRAM).is_dir()


def test_writer_whose_library_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, writer, command in (
        ("torch.utils.tensorboard", lambda: TensorBoardWriter(tmp_path), ".[tensorboard]"),
        ("wandb", lambda: WandbWriter("islands", "island-3"), "pip install wandb"),
    ):
        with case(module=module), monkeypatch.context() as patch:
            # What an import of a module that is not there does.
            patch.setitem(sys.modules, module, None)
            with pytest.raises(SetupError) as refused:
                writer()
            assert command in str(refused.value.remedy)


def test_choice_of_a_writer_has_the_islands_as_its_default_target(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for text, choice in (
        ("tensorboard", WriterChoice("tensorboard", str(folder / "tensorboard"))),
        ("tensorboard:/curves", WriterChoice("tensorboard", "/curves")),
        ("wandb", WriterChoice("wandb", "run")),
        ("wandb:team:islands", WriterChoice("wandb", "team:islands")),
    ):
        with case(text=text):
            assert parse_writer(text, folder) == choice
    for text in ("", "mlflow", "TensorBoard:/curves", ":"):
        with case(text=text), pytest.raises(SetupError, check=has_subject("--log")):
            parse_writer(text, folder)
