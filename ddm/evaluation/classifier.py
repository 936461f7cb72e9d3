"""A small classifier of public images, whose penultimate layer gives features for FID where no public network fits.

Features of ImageNet say little about grey images of 28 x 28. A convolutional network of about 100,000 weights, trained
in a minute or two on a CPU on labelled public images, distinguishes such images; its file's digest is printed with
every figure. Only figures of one and the same file can be compared.
"""

# Shape legend: N images, B images of one batch, C channels, H height, W width.
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import DataError, ShapeError
from ddm.io.tensors import TensorSpec, load_tensors, read_header, save_tensors, spec_of
from ddm.protocol.data import DataSpec
from ddm.system.progress import ProgressCallback

DIM = 64
MAX_FILE_BYTES = 16 * 1024**2
MAX_CLASSES = 1000
_WIDTHS = (32, 64, 96)
_STRIDES = (2, 2, 1)
_POOLED_SIDE = 2
_BATCH_SIZE = 128
_MAX_EPOCHS = 30
_MAX_WEIGHT = 1e3
# Names of what a file has beside the weights.
_SHAPE = "made.shape"
_RANGE = "made.range"
_TRAINED_ON = "made.images"


class Network(nn.Module):
    """Three convolutions of stride 2, 2 and 1, a linear layer of 64 features, and a linear classifier on their ReLU.

    Args:
        channels: C.
        num_classes: how many classes.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        width_in = channels
        for width, stride in zip(_WIDTHS, _STRIDES, strict=True):
            convolution = nn.Conv2d(width_in, width, 3, stride=stride, padding=1)
            self.convolutions.append(convolution)
            width_in = width
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in _WIDTHS)
        num_pooled = _POOLED_SIDE**2 * _WIDTHS[-1]
        self.features = nn.Linear(num_pooled, DIM)
        self.classes = nn.Linear(DIM, num_classes)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the features, shape (B, 64), before their ReLU."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            convolved_BCHW = convolution(x_BCHW)
            x_BCHW = F.relu(norm(convolved_BCHW))
        pooled = F.adaptive_avg_pool2d(x_BCHW, _POOLED_SIDE)
        embedded: Tensor = self.features(pooled.flatten(1))
        return embedded

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, number of classes)."""
        features = self.embed(x_BCHW)
        logits: Tensor = self.classes(F.relu(features))
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
        self,
        images: Tensor,
        on_progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Return features, shape (N, 64), of images in the range that the network was trained on."""
        features = []
        for block in torch.split(images.float(), _BATCH_SIZE):
            scaled = _scaled(block, self.data)
            features.append(self.net.embed(scaled))
        return torch.cat(features)

    @torch.inference_mode()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the share of images whose class is recognised."""
        image_blocks = torch.split(images.float(), _BATCH_SIZE)
        label_blocks = torch.split(labels, _BATCH_SIZE)
        num_correct = 0
        for block, label_B in zip(image_blocks, label_blocks, strict=True):
            logits = self.net(_scaled(block, self.data))
            predicted_B = logits.argmax(1)
            is_correct_B = predicted_B == label_B
            num_correct += int(is_correct_B.sum())
        return num_correct / len(images)

    def save(self, path: Path) -> None:
        """Write weights, shape, range and the digest of the training images as one safetensors file."""
        digest = list(bytes.fromhex(self.trained_on))
        tensors = {
            **self.net.state_dict(),
            _SHAPE: torch.tensor(self.data.shape),
            _RANGE: torch.tensor(self.data.range, dtype=torch.float64),
            _TRAINED_ON: torch.tensor(digest, dtype=torch.uint8),
        }
        save_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path) -> "Classifier":
        """Open a file that `save` wrote.

        Raises:
            TensorFileError: other names, shapes or dtypes, or values that are not finite.
        """
        # The header says how large the network is; then exactly the tensors of this network are required.
        header = read_header(path, max_bytes=MAX_FILE_BYTES)
        channels, num_classes = _network_size(header)
        expected = _expected_tensors(channels, num_classes)
        tensors = load_tensors(
            path,
            expected,
            max_bytes=MAX_FILE_BYTES,
            max_abs=_MAX_WEIGHT,
        )
        shape = tensors.pop(_SHAPE).tolist()
        value_range = tensors.pop(_RANGE).tolist()
        digest_bytes = tensors.pop(_TRAINED_ON).tolist()
        # What is left are the weights.
        net = Network(channels, num_classes)
        net.load_state_dict(tensors)
        net.eval().requires_grad_(False)
        try:
            data = DataSpec(shape=tuple(shape), range=tuple(value_range))
        except ValueError as error:
            raise DataError(
                path.name,
                expected="the shape and range of images",
                got=str(shape),
                remedy="Name a classifier that examples.paper.classifier wrote.",
            ) from error
        return cls(net, data, trained_on=bytes(digest_bytes).hex())


def _network_size(header: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Return channels and number of classes of a file's network.

    Where a header gives none, any size will do: the file is then refused for its other tensors.
    """
    channels = 1
    num_classes = 2
    convolution = header.get("convolutions.0.weight")
    if convolution is not None:
        shape = convolution.shape
        if len(shape) == 4 and shape[1] in (1, 3):
            channels = shape[1]
    bias = header.get("classes.bias")
    if bias is not None:
        shape = bias.shape
        if len(shape) == 1 and shape[0] <= MAX_CLASSES:
            num_classes = shape[0]
    return channels, num_classes


def _expected_tensors(channels: int, num_classes: int) -> dict[str, TensorSpec]:
    # Only shapes are needed; the meta device allocates nothing.
    with torch.device("meta"):
        weights = Network(channels, num_classes).state_dict()
    expected = {}
    for name, weight in weights.items():
        expected[name] = spec_of(weight)
    expected[_SHAPE] = TensorSpec("I64", (3,))
    expected[_RANGE] = TensorSpec("F64", (2,))
    expected[_TRAINED_ON] = TensorSpec("U8", (32,))
    return expected


def train_classifier(
    images: Tensor,
    labels: Tensor,
    data: DataSpec,
    *,
    num_steps: int = 1500,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Classifier:
    """Train a classifier; the same images, seed and machine give the same weights.

    AdamW with a one-cycle rate, batches of 128 without replacement, images moved by up to an eighth of their side.

    Args:
        images: public images, shape (N, C, H, W), in the range of `data`.
        labels: the class of each, from 0, int64.
        data: shape and range.
        num_steps: at most; fewer where 30 epochs are fewer.
        seed: the seed of weights, order and shifts.
        on_progress: called with steps done and steps in all.

    Raises:
        ShapeError: images of another shape, or another number of labels.
        DataError: volumes, one class only, or labels that are not classes.
    """
    num_images = len(images)
    num_classes = _check_training_data(images, labels, data)
    steps_an_epoch = max(1, num_images // _BATCH_SIZE)
    num_steps = min(num_steps, _MAX_EPOCHS * steps_an_epoch)
    batch_size = min(_BATCH_SIZE, num_images)
    generator = torch.Generator().manual_seed(seed)
    # Layers draw their weights from the global generator, whose state belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Network(data.shape[0], num_classes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=4e-3,
        total_steps=num_steps,
    )
    # The images that this epoch has not used yet, in random order.
    unused_N = torch.empty(0, dtype=torch.int64)
    for step in range(num_steps):
        # The rest of an epoch that fills no batch is dropped.
        if len(unused_N) < batch_size:
            unused_N = torch.randperm(num_images, generator=generator)
        batch_B = unused_N[:batch_size]
        unused_N = unused_N[batch_size:]
        scaled = _scaled(images[batch_B].float(), data)
        shifted = _shift(scaled, generator)
        loss = F.cross_entropy(net(shifted), labels[batch_B])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if on_progress:
            on_progress(step + 1, num_steps)
    net.eval().requires_grad_(False)
    return Classifier(net, data, digest_of_training(images, labels))


def _check_training_data(
    images: Tensor,
    labels: Tensor,
    data: DataSpec,
) -> int:
    """Check images and labels; return the number of classes."""
    has_shape = tuple(images.shape[1:]) == data.shape
    if not has_shape or len(labels) != len(images):
        raise ShapeError(
            "training images",
            expected=f"shape (N, {data.shape}) and N labels",
            got=f"images {tuple(images.shape)} and {len(labels)} labels",
        )
    lowest_label = int(labels.min())
    num_classes = int(labels.max()) + 1
    are_images = len(data.shape) == 3 and data.shape[0] in (1, 3)
    are_classes = lowest_label >= 0 and 2 <= num_classes <= MAX_CLASSES
    if not (are_images and are_classes):
        raise DataError(
            "training images",
            expected=f"1 or 3 channels, 2 to {MAX_CLASSES} classes from 0",
            got=f"{num_classes} classes, shape {data.shape}",
        )
    return num_classes


def digest_of_training(images: Tensor, labels: Tensor) -> str:
    """Return the sha256 of the training images and labels, which a classifier's file names."""
    image_bytes = images.float().contiguous().numpy().data
    label_bytes = labels.contiguous().numpy().data
    digest = hashlib.sha256(image_bytes)
    digest.update(label_bytes)
    return digest.hexdigest()


def _scaled(images: Tensor, data: DataSpec) -> Tensor:
    """Return images in the range [-1, 1]."""
    low, high = data.range
    share_of_range = (images - low) / (high - low)
    return share_of_range * 2 - 1


def _shift(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Shift a batch by whole pixels, the same for all its images; the darkest value comes in at the edge."""
    height, width = x_BCHW.shape[2:]
    shorter_side = min(height, width)
    max_shift = max(1, shorter_side // 8)
    num_places = 2 * max_shift + 1
    place = torch.randint(num_places, (2,), generator=generator)
    top, left = place.tolist()
    # The darkest value of a scaled image.
    padded = F.pad(x_BCHW, (max_shift,) * 4, value=-1.0)
    rows = slice(top, top + height)
    columns = slice(left, left + width)
    return padded[:, :, rows, columns]
