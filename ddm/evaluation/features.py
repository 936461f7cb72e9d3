"""The features that images are compared by: of the plan's encoder, a network of timm, CLIP, or a small classifier.

Figures of different features cannot be compared, so name and digest of the features are printed with every figure.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddm.encoders.timm import TimmEncoder, names
from ddm.errors import DataError, MissingFileError, SetupError
from ddm.evaluation.classifier import Classifier
from ddm.io.files import read_bounded, require_file
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import sha256_file
from ddm.protocol.data import DataSpec
from ddm.protocol.plan import Plan

FORMS = "encoder, timm:NAME=FILE, timm:FILE, clip:FOLDER, or FILE.safetensors of a small classifier"
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Features:
    """A frozen network that turns images into features.

    Attributes:
        name: what it is, without a path.
        digest: sha256 of its weights; None for features that the caller computes.
        dim: values of one feature.
        encode: from images (N, C, H, W) in the data's range to features (N, D), float32.
    """

    name: str
    digest: str | None
    dim: int
    encode: Callable[[Tensor], Tensor]


def open_features(
    text: str,
    data: DataSpec,
    open_encoder: Callable[[], Features] | None = None,
) -> Features:
    """Open the features that a user named.

    Args:
        text: one of `FORMS`.
        data: shape and range of the images.
        open_encoder: opens those of the plan's encoder, see `encoder_features`; None where no plan is at hand.

    Raises:
        SetupError: another form, a network that timm does not have, weights of another one, or no plan's encoder.
        MissingFileError: nothing at the path.
        TensorFileError: weights that are not strictly what they should be.
        DataError: features for images of another shape or range.
    """
    kind, colon, source = text.partition(":")
    if text == "encoder":
        if open_encoder is None:
            raise SetupError(
                "--features",
                expected="features from a file: timm:FILE, clip:FOLDER, or a small classifier",
                got="encoder, which is in the release and not beside its student",
                remedy="Train a small classifier: `python -m examples.paper.classifier --data public.npz --out "
                "classifier.safetensors` in Archipelago's repository, then add --features classifier.safetensors.",
            )
        return open_encoder()
    if kind == "timm" and source:
        return _open_timm(source, data)
    if kind == "clip" and source:
        return _open_clip(source, data)
    # A path may contain a colon too.
    if colon and not Path(text).exists():
        raise SetupError(
            "--features",
            expected=FORMS,
            got=repr(text[:80]),
            remedy="Name the features in one of these forms.",
        )
    return _open_classifier(Path(text), data)


def encoder_features(plan: Plan, folder: Path) -> Features:
    """Open the features of a plan's own encoder.

    Args:
        plan: the plan of a verified release.
        folder: the release's, which holds the plan's files.

    Raises:
        TensorFileError: weights that are not strictly what they should be.
    """
    encoder = PlanFiles.load(plan, folder).encoder
    return Features(
        name=f"encoder ({plan.encoder.kind})",
        digest=plan.file(plan.encoder.path).digest,
        dim=encoder.dim,
        encode=encoder.encode,
    )


def _open_clip(text: str, data: DataSpec) -> Features:
    from ddm.encoders.vision import ClipVision  # takes seconds

    folder = Path(text)
    if not folder.is_dir():
        raise MissingFileError(
            text,
            expected="a folder of a CLIP of transformers",
            got="no folder of that name",
        )
    clip = ClipVision.open(folder, data)
    return Features("clip", clip.digest, clip.dim, clip.encode)


def _open_timm(text: str, data: DataSpec) -> Features:
    if len(data.shape) != 3:
        raise DataError(
            "--features",
            expected="images, for a network of timm",
            got="volumes",
            remedy="Compare volumes by the plan's encoder: --features encoder.",
        )
    model, equals, file = text.rpartition("=")
    path = require_file(Path(file), "weights of a network of timm")
    if not equals:
        model = network_name(path)
    encoder = TimmEncoder.from_file(model, path, data)
    return Features(f"timm {model}", sha256_file(path), encoder.dim, encoder.encode)


def network_name(path: Path) -> str:
    """Return the network's name: from `config.json` beside the file, as timm publishes it, or from the file's name.

    Raises:
        SetupError: neither names a network of timm.
    """
    config = path.parent / "config.json"
    if config.is_file():
        try:
            architecture = json.loads(read_bounded(config, _MAX_CONFIG_BYTES)).get("architecture")
        except (ValueError, AttributeError):
            # Any file may have this name; the name of the weights is then all there is.
            architecture = None
        if isinstance(architecture, str):
            return architecture
    model = path.name.partition(".")[0]
    if model not in names():
        raise SetupError(
            "--features",
            expected="a config.json beside the file, or a file named after its network",
            got=path.name[:80],
            remedy="Name the network: --features timm:resnet18=FILE.",
        )
    return model


def _open_classifier(path: Path, data: DataSpec) -> Features:
    require_file(path, "a small classifier, or one of: " + FORMS)
    classifier = Classifier.load(path)
    if classifier.data != data:
        expected = f"a classifier of images {data.shape} in {list(data.range)}"
        got = f"{classifier.data.shape} in {list(classifier.data.range)}"
        raise DataError(
            "--features",
            expected=expected,
            got=got,
            remedy="Take features for images of this shape, or --features encoder.",
        )
    return Features("small classifier", sha256_file(path), classifier.dim, classifier.encode)
