"""A small classifier of public images, whose penultimate layer gives features for FID where no public network fits.

Features of ImageNet say little about grey images of 28 x 28. A convolutional network of about 100,000 weights, trained
in a minute or two on a CPU on labelled public images, tells such images apart; its file's digest stands beside every
figure. Only figures of one and the same file can be compared.
"""

# Shape legend: N images, B images of one batch, C channels, H height, W width.
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import DataError, ShapeError
from ddm.io.tensors import TensorSpec, load_tensors, read_header, save_tensors, spec_of
from ddm.protocol.data import DataSpec

DIM = 64
MAX_FILE_BYTES = 16 * 1024**2
MAX_CLASSES = 1000
_WIDTHS = (32, 64, 96)
_BATCH, _MOST_EPOCHS = 128, 30
_MAX_WEIGHT = 1e3
_SHAPE, _RANGE, _TRAINED_ON = "made.shape", "made.range", "made.images"


class Network(nn.Module):
    """Three convolutions of stride 2, 2 and 1, a linear layer of 64 features, and a linear classifier on their ReLU.

    Args:
        channels: C.
        num_classes: how many classes.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        widths = (channels, *_WIDTHS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(widths[n], widths[n + 1], 3, stride=2 if n < 2 else 1, padding=1)
            for n in range(3)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in _WIDTHS)
        self.features = nn.Linear(4 * _WIDTHS[-1], DIM)
        self.classes = nn.Linear(DIM, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the features, shape (B, 64), before their ReLU."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x_BCHW = F.relu(norm(convolution(x_BCHW)))
        embedded: Tensor = self.features(F.adaptive_avg_pool2d(x_BCHW, 2).flatten(1))
        return embedded

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, number of classes)."""
        logits: Tensor = self.classes(F.relu(self.embed(x_BCHW)))
        return logits


@dataclass(frozen=True)
class Classifier:
    """A trained network and what it was trained on.

    Attributes:
        net: the network.
        data: shape and range of its images.
        trained_on: sha256 of the training images and labels.
    """

    net: Network
    data: DataSpec
    trained_on: str

    @property
    def dim(self) -> int:
        """The number of features."""
        return DIM

    @torch.inference_mode()
    def encode(
        self, images: Tensor, on_progress: Callable[[int, int], None] | None = None
    ) -> Tensor:
        """Return features, shape (N, 64), of images in the range that the network was trained on."""
        return torch.cat(
            [self.net.embed(self._scaled(block)) for block in torch.split(images.float(), _BATCH)]
        )

    @torch.inference_mode()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the share of images whose class is found."""
        right = [
            (self.net(self._scaled(block)).argmax(1) == label).sum()
            for block, label in zip(
                torch.split(images.float(), _BATCH), torch.split(labels, _BATCH), strict=True
            )
        ]
        return float(sum(right) / len(images))

    def _scaled(self, images: Tensor) -> Tensor:
        return _scaled(images, self.data)

    def save(self, path: Path) -> None:
        """Write weights, shape, range and the digest of the training images as one safetensors file."""
        tensors = {
            **self.net.state_dict(),
            _SHAPE: torch.tensor(self.data.shape),
            _RANGE: torch.tensor(self.data.range, dtype=torch.float64),
            _TRAINED_ON: torch.tensor(list(bytes.fromhex(self.trained_on)), dtype=torch.uint8),
        }
        save_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path) -> "Classifier":
        """Open a file that `save` wrote.

        Raises:
            TensorFileError: other names, shapes or dtypes, or values that are not finite.
        """
        found = read_header(path, max_bytes=MAX_FILE_BYTES)
        first, last = (
            found.get(name, TensorSpec("F32", ())).shape
            for name in ("convolutions.0.weight", "classes.bias")
        )
        channels = first[1] if len(first) == 4 and first[1] in (1, 3) else 1
        num_classes = last[0] if len(last) == 1 and last[0] <= MAX_CLASSES else 2
        with torch.device("meta"):
            wanted = {
                name: spec_of(each)
                for name, each in Network(channels, num_classes).state_dict().items()
            }
        wanted |= {
            _SHAPE: TensorSpec("I64", (3,)),
            _RANGE: TensorSpec("F64", (2,)),
            _TRAINED_ON: TensorSpec("U8", (32,)),
        }
        loaded = load_tensors(path, wanted, max_bytes=MAX_FILE_BYTES, max_abs=_MAX_WEIGHT)
        shape, low_high, digest = (loaded.pop(name) for name in (_SHAPE, _RANGE, _TRAINED_ON))
        net = Network(channels, num_classes)
        net.load_state_dict(loaded)
        try:
            data = DataSpec(shape=tuple(shape.tolist()), range=tuple(low_high.tolist()))
        except ValueError as error:
            raise DataError(
                path.name, expected="the shape and range of images", got=str(shape.tolist())
            ) from error
        return cls(net.eval().requires_grad_(False), data, bytes(digest.tolist()).hex())


def train_classifier(
    images: Tensor,
    labels: Tensor,
    data: DataSpec,
    *,
    num_steps: int = 1500,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Classifier:
    """Train a classifier; the same images, seed and machine give the same weights.

    AdamW with a one-cycle rate, batches of 128 without replacement, images moved by up to an eighth of their side.

    Args:
        images: public images, shape (N, C, H, W), in the range of `data`.
        labels: the class of each, from 0, int64.
        data: shape and range.
        num_steps: at most; fewer where 30 epochs are fewer.
        seed: of weights, order and shifts.
        on_progress: called with steps done and steps in all.

    Raises:
        ShapeError: images of another shape, or another number of labels.
        DataError: volumes, one class only, or labels that are no classes.
    """
    if tuple(images.shape[1:]) != data.shape or len(labels) != len(images):
        got = f"images {tuple(images.shape)} and {len(labels)} labels"
        raise ShapeError(
            "training images", expected=f"shape (N, {data.shape}) and N labels", got=got
        )
    num_classes = int(labels.max()) + 1
    if (
        len(data.shape) != 3
        or data.shape[0] not in (1, 3)
        or int(labels.min()) < 0
        or not 2 <= num_classes <= MAX_CLASSES
    ):
        got = f"{num_classes} classes, shape {data.shape}"
        raise DataError(
            "training images",
            expected=f"1 or 3 channels, 2 to {MAX_CLASSES} classes from 0",
            got=got,
        )
    steps = min(num_steps, _MOST_EPOCHS * max(1, len(images) // _BATCH))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Network(data.shape[0], num_classes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    order_N = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order_N) < min(_BATCH, len(images)):
            order_N = torch.randperm(len(images), generator=generator)
        picked, order_N = order_N[:_BATCH], order_N[_BATCH:]
        moved = _moved(_scaled(images[picked].float(), data), generator)
        loss = F.cross_entropy(net(moved), labels[picked])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if on_progress:
            on_progress(step + 1, steps)
    return Classifier(net.eval().requires_grad_(False), data, digest_of_training(images, labels))


def digest_of_training(images: Tensor, labels: Tensor) -> str:
    """Return the sha256 of training images and labels that a classifier bears."""
    digest = hashlib.sha256(images.float().contiguous().numpy().data)
    digest.update(labels.contiguous().numpy().data)
    return digest.hexdigest()


def _scaled(images: Tensor, data: DataSpec) -> Tensor:
    low, high = data.range
    return (images - low) / (high - low) * 2 - 1


def _moved(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch by whole pixels, the same for all its images; the darkest value comes in at the edge."""
    most = max(1, min(x_BCHW.shape[2:]) // 8)
    down, right = torch.randint(2 * most + 1, (2,), generator=generator).tolist()
    padded = F.pad(x_BCHW, (most,) * 4, value=-1.0)
    return padded[:, :, down : down + x_BCHW.shape[2], right : right + x_BCHW.shape[3]]
