"""Networks that give features: the small classifier, CLIP from a folder; strict files, the same figures again."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ddm.encoders.vision import ClipVision
from ddm.errors import DataError, MissingFileError, SetupError, ShapeError, TensorFileError
from ddm.evaluation import Reference, SampleOrigins, evaluate
from ddm.evaluation.classifier import Classifier, Network, train_classifier
from ddm.evaluation.features import network_name
from ddm.evaluation.reference import classes_of, open_reference
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.base import sha256_file
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.text_encoders import make_encoder

SPEC = DataSpec(shape=(1, 8, 8), range=(0.0, 1.0))


def stripes(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images, striped across or along: the class."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(num) % 2
    across = (torch.arange(8) % 4 < 2).float()
    clean = torch.where(label[:, None, None] == 0, across[:, None], across[None, :])[:, None]
    return (0.7 * clean + 0.3 * torch.rand(num, 1, 8, 8, generator=generator)), label


def test_classifier_learns_is_kept_and_opened_as_it_was(tmp_path: Path) -> None:
    images, labels = stripes(512, 0)
    trained = train_classifier(images, labels, SPEC, num_steps=30)
    fresh, truth = stripes(200, 1)
    assert trained.accuracy(fresh, truth) > 0.95
    assert sum(parameter.numel() for parameter in Network(1, 10).parameters()) == pytest.approx(
        100_000, rel=0.02
    )
    twice = [
        train_classifier(images, labels, SPEC, num_steps=2, seed=seed).encode(fresh[:5])
        for seed in (1, 1, 2)
    ]
    assert torch.equal(twice[0], twice[1]) and not torch.equal(twice[0], twice[2])
    trained.save(tmp_path / "c.safetensors")
    opened = Classifier.load(tmp_path / "c.safetensors")
    assert (opened.data, opened.trained_on) == (SPEC, trained.trained_on)
    assert torch.equal(opened.encode(fresh), trained.encode(fresh))


def test_file_of_a_classifier_that_is_not_one_is_refused(tmp_path: Path) -> None:
    images, labels = stripes(64, 0)
    path = tmp_path / "c.safetensors"
    train_classifier(images, labels, SPEC, num_steps=1).save(path)
    tensors = load_tensors(path, None, max_bytes=1 << 24)
    wrong = {
        "a tensor missing": {
            name: tensor for name, tensor in tensors.items() if name != "features.bias"
        },
        "a tensor too many": tensors | {"more": torch.zeros(1)},
        "another shape": tensors | {"features.weight": torch.zeros(64, 3)},
        "not finite": tensors | {"features.bias": torch.full((64,), torch.nan)},
        "another range": tensors | {"made.range": torch.tensor([1.0, 0.0], dtype=torch.float64)},
    }
    for what, changed in wrong.items():
        with case(what=what):
            save_tensors(path, changed)
            with pytest.raises((TensorFileError, DataError)):
                Classifier.load(path)
    with pytest.raises(ShapeError):
        train_classifier(images, labels[:5], SPEC)
    with pytest.raises(DataError, check=has_subject("training images")):
        train_classifier(images, torch.zeros(64).long(), SPEC)


def clip_folder(folder: Path, seed: int = 0) -> tuple[Path, torch.nn.Module]:
    """A tiny CLIP as transformers saves one."""
    net = make_encoder("CLIPModel", seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(net.config.to_dict()))
    save_tensors(folder / "model.safetensors", net.state_dict())
    return folder, net


def test_clip_gives_the_image_embeddings_of_the_whole_network(tmp_path: Path) -> None:
    folder, net = clip_folder(tmp_path / "clip")
    opened = ClipVision.open(folder, SPEC)
    images = torch.rand(70, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        outputs = net.get_image_features(pixel_values=opened.prepare(images))
    expected = getattr(outputs, "pooler_output", outputs)
    torch.testing.assert_close(opened.encode(images), expected, rtol=1e-4, atol=1e-5)
    assert opened.encode(images).shape == (70, opened.dim) == (70, 4)
    # The cache of Hugging Face holds links.
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert ClipVision.open(snapshot, SPEC).digest == opened.digest
    other = ClipVision.open(clip_folder(tmp_path / "other", seed=1)[0], SPEC)
    assert other.digest != opened.digest and not torch.allclose(
        other.encode(images), expected, atol=1e-2
    )
    wide = ClipVision.open(folder, DataSpec(shape=(3, 10, 30), range=(-1.0, 1.0)))
    assert wide.prepare(torch.zeros(2, 3, 10, 30)).shape == (2, 3, 8, 8)


def test_folder_without_a_whole_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        ClipVision.open(tmp_path, SPEC)
    folder, net = clip_folder(tmp_path / "clip")
    lost = {
        name: tensor for name, tensor in net.state_dict().items() if "visual_projection" not in name
    }
    save_tensors(folder / "model.safetensors", lost)
    with pytest.raises(SetupError, match="missing"):
        ClipVision.open(folder, SPEC)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SetupError, match="bert"):
        ClipVision.open(folder, SPEC)
    with pytest.raises(DataError):
        ClipVision.open(folder, DataSpec(shape=(2, 8, 8), range=(0.0, 1.0)))


def test_network_of_timm_is_named_by_the_folder_or_by_the_file(tmp_path: Path) -> None:
    assert network_name(tmp_path / "resnet18.a1_in1k.safetensors") == "resnet18"
    with pytest.raises(SetupError, check=has_subject("--features")):
        network_name(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    assert network_name(tmp_path / "model.safetensors") == "vit_tiny_patch16_224"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reference_is_read_in_blocks_and_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: object
) -> None:
    monkeypatch.setattr("ddm.images.npz.BLOCK_BYTES", 7 * 64)
    grey = np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8)
    save(tmp_path / "r.npz", images=grey, labels=np.arange(40) % 3)
    reference = open_reference(tmp_path / "r.npz", SPEC)
    blocks = list(reference.blocks())
    assert [len(block) for block in blocks] == [7] * 5 + [5]
    np.testing.assert_allclose(torch.cat(blocks).numpy()[:, 0], grey / 255.0, rtol=1e-6)
    rows = reference.rows([31, 2, 31])
    assert list(rows) == [2, 31] and torch.equal(rows[31], torch.cat(blocks)[31])
    assert (reference.group_name, reference.groups[:4]) == ("labels", ["0", "1", "2", "0"])


@pytest.mark.parametrize("kind", ["npz", "npy", "folder", "parts", "parquet"])
def test_reference_may_be_any_kind_of_data(tmp_path: Path, kind: str) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8)
    labels = np.arange(40) % 3
    path = tmp_path / {"npz": "r.npz", "npy": "r.npy", "parquet": "r.parquet"}.get(kind, "r")
    if kind == "npz":
        np.savez(path, images=grey, labels=labels)
    elif kind == "npy":
        np.save(path, grey)
    elif kind == "parquet":
        pd.DataFrame({"image": list(grey.reshape(40, 64)), "label": labels}).to_parquet(path)
    else:
        path.mkdir()
        np.save(path / "labels.npy", labels)
        for number, part in enumerate(np.array_split(grey, 1 if kind == "folder" else 3)):
            np.save(path / ("images.npy" if kind == "folder" else f"images-{number}.npy"), part)
    reference = open_reference(path, SPEC)
    np.testing.assert_allclose(
        torch.cat(list(reference.blocks())).numpy()[:, 0], grey / 255.0, rtol=1e-6
    )
    assert list(reference.groups) == ([] if kind == "npy" else [str(label) for label in labels])
    assert reference.digest is not None


def test_samples_that_copy_the_reference_are_found_and_shown_first() -> None:
    generator = torch.Generator().manual_seed(0)
    real, others = torch.rand(2, 300, 1, 6, 6, generator=generator)
    samples = torch.cat([others[:190], real[:10] + 1e-3])
    evaluation = evaluate(samples, real, holdout=others[200:])
    for space in ("pixels", "features"):
        copies = evaluation.copies[space]
        assert sorted(copies.worst[:10]) == list(range(190, 200))
        assert [int(copies.nearest_index_N[n]) for n in range(190, 200)] == list(range(10))
        assert copies.near.low > 0.01 > 0.0 and float(copies.ratio_N.max()) > 0.9
    honest = evaluate(others[:200], real, holdout=others[200:])
    assert honest.copies["pixels"].near.low < 0.02


def test_a_notebooks_arrays_give_the_same_figures_as_tensors_and_as_a_reference_in_blocks() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(60, 4))
    real = rng.normal(size=(90, 4))
    plain = evaluate(
        samples,
        Reference.of(real, np.arange(90) % 2),
        origins=SampleOrigins(np.arange(60) % 2, prior=[1, 1]),
    ).to_json()
    torch_too = evaluate(
        torch.from_numpy(samples),
        Reference.of(torch.from_numpy(real), groups=[n % 2 for n in range(90)]),
        origins=SampleOrigins(torch.arange(60) % 2, prior=[0.5, 0.5]),
    )
    assert json.dumps(torch_too.to_json()) == json.dumps(plain)
    assert plain["share_error"]["value"] == 0.0 and set(plain["recall_by"]) == {"0", "1"}
    # labels are no silos
    assert {figures["num_reference"] for figures in plain["per_silo"].values()} == {90}
    with pytest.raises(ShapeError):
        evaluate(samples, real, origins=SampleOrigins([0, 1]))
    with pytest.raises(ShapeError):
        evaluate(samples, real[:, :3])


def test_reference_may_be_idx_with_its_labels_beside(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    labels = np.arange(6, dtype=np.uint8) % 3
    for name, array in (("t10k-images-idx3-ubyte", grey), ("t10k-labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(
            side.to_bytes(4, "big") for side in array.shape
        )
        (tmp_path / name).write_bytes(header + array.tobytes())
    reference = open_reference(tmp_path / "t10k-images-idx3-ubyte", SPEC)
    np.testing.assert_allclose(
        torch.cat(list(reference.blocks())).numpy()[:, 0], grey / 255.0, rtol=1e-6
    )
    assert (reference.num, reference.groups, reference.group_name) == (
        6,
        ["0", "1", "2", "0", "1", "2"],
        "labels",
    )
    assert reference.digest == sha256_file(tmp_path / "t10k-images-idx3-ubyte")
    classes = classes_of(reference, Classes(3))
    assert classes is not None and classes.tolist() == labels.tolist()
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert not open_reference(tmp_path / "t10k-images-idx3-ubyte", SPEC).groups
    with pytest.raises(DataError, check=has_subject("--by")):
        open_reference(tmp_path / "t10k-images-idx3-ubyte", SPEC, by="labels")
