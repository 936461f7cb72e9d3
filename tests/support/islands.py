"""One owner's small data set in islands, by the real commands: digits, tiny experts, seconds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.commands import CommandResult, run_command

RECIPE = """
[data]
shape = [1, 8, 8]
range = [-1.0, 1.0]
[encoder]
kind = "pca"
dim = 12
[clustering]
num_fine = 24
num_coarse = 2
[sketch]
rank = 12
[partition]
kind = "silo_cluster"
min_images = 40
[expert.architecture]
kind = "dit"
patch = 4
hidden = 16
depth = 1
heads = 2
[expert.training]
num_steps = {steps}
batch_size = 8
learning_rate = 0.002
weight_decay = 0.01
ema_decay = 0.9
[router]
kind = "learned"
hidden = 16
depth = 1
num_steps = 40
[owner]
name = "digits"
num_groups = 8
"""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 600 real images of digits, float32 (N, 1, 8, 8) in [-1, 1], and their classes."""
    from sklearn.datasets import load_digits

    data_set = load_digits()
    images = data_set.images[:600, None] / 8 - 1
    return images.astype(np.float32), data_set.target[:600].astype(np.int64)


@dataclass(frozen=True)
class Owner:
    """One owner's folder of files.

    Attributes:
        path: holds the data, the recipe and the passphrase; the islands are made in `run`.
    """

    path: Path

    @property
    def run(self) -> Path:
        """The folder of the islands."""
        return self.path / "run"

    @property
    def root(self) -> Path:
        """The root of trust."""
        return self.run / "1.root.json"

    @classmethod
    def make(cls, path: Path, *, steps: int = 10, recipe: str = RECIPE, extra: str = "") -> "Owner":
        """Write the data, with the columns `labels`, `site` and `captions`, the recipe and the passphrase."""
        path.mkdir(parents=True, exist_ok=True)
        images, label_N = digits()
        site_N = np.where(label_N < 4, "low", "high")
        captions = np.array([f"the digit {label}" for label in label_N])
        np.savez(path / "data.npz", images=images, labels=label_N, site=site_N, captions=captions)
        (path / "plan.toml").write_text(recipe.format(steps=steps) + extra)
        (path / "pass").write_text("a passphrase\n")
        return cls(path)

    def split(self, *words: object) -> CommandResult:
        """Run `ddm split`."""
        known = (
            "--data",
            self.path / "data.npz",
            "--recipe",
            self.path / "plan.toml",
            "--out",
            self.run,
        )
        return run_command("ddm", "split", *known, "--passphrase-file", self.path / "pass", *words)

    def train(self, *words: object) -> CommandResult:
        """Run `ddm train`."""
        return run_command("ddm", "train", self.run, "--device", "cpu", *words)

    def assemble(self, out: str, *words: object) -> CommandResult:
        """Run `ddm assemble` into a folder beside the islands."""
        known = (
            "--out",
            self.path / out,
            "--device",
            "cpu",
            "--passphrase-file",
            self.path / "pass",
        )
        return run_command("ddm", "assemble", self.run, *known, *words)

    def read(self, verb: str, release: str, *words: object) -> CommandResult:
        """Run a researcher's command on a release."""
        known = ("--root", self.root, "--state", self.path / f"state-{release}")
        return run_command("ddm", verb, self.path / release, *known, *words)
