"""States in which people read a remedy and do what it says, beyond the mistakes of `tests/test_mistakes.py`."""

import codecs
import pickle
from collections.abc import Callable

import numpy as np
import tomli_w
import torch
from safetensors.torch import save_file

from ddm.evaluation.classifier import train_classifier
from ddm.io.tensors import load_tensors, read_header
from ddm.protocol.data import DataSpec
from tests.support.commands import run_command
from tests.support.federation import images, recipe
from tests.support.islands import RECIPE, digits
from tests.support.mistakes import (
    Mistake,
    Step,
    WaitingFederation,
    Words,
    copy_file,
    in_turn,
    move_file,
    status_command,
    type_command,
)


def sample(*words: object) -> Callable[[WaitingFederation], Words]:
    """`ddm sample` of one image in one step, with further options."""
    return lambda w: [
        *("ddm", "sample", *w.release("--num", 1, "--steps", 1, "--out", w.path / "a.png")),
        *words,
    ]


def evaluate(
    *words: object, reference: str = "real.npz", num: int = 16
) -> Callable[[WaitingFederation], Words]:
    """`ddm evaluate` of a few samples, with further options."""
    return lambda w: [
        *("ddm", "evaluate", *w.release("--num", num, "--steps", 1)),
        *("--reference", w.path / reference, *words),
    ]


def evaluate_file(name: str, *words: object) -> Callable[[WaitingFederation], Words]:
    """`ddm evaluate` of a file of samples."""
    return lambda w: [
        *("ddm", "evaluate", *w.release("--samples", w.path / name)),
        *("--reference", w.path / "real.npz", *words),
    ]


def save_arrays(name: str, **arrays: np.ndarray) -> Step:
    """Write an npz into the world's folder."""
    return lambda w: np.savez(w.path / name, **arrays)  # type: ignore[arg-type]


def write_bytes(name: str, data: bytes) -> Step:
    return lambda w: (w.path / name).write_bytes(data)


def remove_file(name: str) -> Step:
    return lambda w: (w.path / name).unlink()


def rewrite(source: str, target: str, change: Callable[[bytes], bytes]) -> Step:
    """Write a changed copy of a file, as a mail program would."""
    return lambda w: (w.path / target).write_bytes(change((w.path / source).read_bytes()))


def with_recipe(**tables: object) -> Step:
    """Write a recipe in which some tables are others."""

    def write(world: WaitingFederation) -> None:
        changed = recipe().model_dump(mode="json", exclude_none=True) | tables
        (world.path / "changed.toml").write_text(tomli_w.dumps(changed))

    return write


def plan_with(name: str) -> Callable[[WaitingFederation], Words]:
    return lambda w: [*w.plan(recipe=w.path / name), "--yes"]


def plan_as_usual(world: WaitingFederation) -> Words:
    return [*world.plan(), "--yes"]


def enroll_card(name: str) -> Callable[[WaitingFederation], Words]:
    return lambda w: ["aggregator", "enroll", w.fed, w.path / name]


def own_data(world: WaitingFederation) -> None:
    """Write the data set and the recipe of an owner of islands."""
    values, _ = digits()
    np.savez(world.path / "own.npz", images=values)
    (world.path / "own.toml").write_text(RECIPE.format(steps=10))


def own_islands_with_a_seed(world: WaitingFederation) -> None:
    """Split an owner's data set into islands that start from a seed, which is not trained."""
    own_data(world)
    words = [
        *("ddm", "split", "--data", world.path / "own.npz", "--recipe", world.path / "own.toml"),
        *("--islands", 2, "--seed-share", 0.2, "--out", world.path / "islands", *world.secret),
    ]
    assert type_command(words).code == 0


def federation_status(world: WaitingFederation) -> Words:
    return ["aggregator", "status", world.fed]


def scan_of_pictures(world: WaitingFederation) -> Words:
    return [
        *("silo", "scan", "--data", world.path / "north.npz"),
        *("--private", world.path / "scanned"),
    ]


REAL = images(48, 0.0, seed=7)
SAMPLES = images(24, 0.0, seed=8)
SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))


def save_classifier(name: str, prefix: str = "") -> Step:
    """Write a classifier of two classes, its tensors under names with a prefix."""

    def write(world: WaitingFederation) -> None:
        labels = torch.arange(len(REAL)) % 2
        classifier = train_classifier(torch.from_numpy(REAL), labels, SPEC, num_steps=2)
        plain = world.path / "plain.safetensors"
        classifier.save(plain)
        header = read_header(plain, max_bytes=1 << 24)
        tensors = load_tensors(plain, header, max_bytes=1 << 24, max_abs=None)
        save_file({prefix + key: value for key, value in tensors.items()}, world.path / name)

    return write


REMEDY_STATES: dict[str, Mistake] = {
    # Drawing samples
    "a text for experts without texts": Mistake(
        sample("--text", "a cat"), 3, "leave --text out", repeated_command=sample()
    ),
    "a class for experts without classes": Mistake(
        sample("--class", 1), 3, "Leave --class out", repeated_command=sample()
    ),
    "guidance without a condition": Mistake(
        sample("--guidance", 2), 3, "--class or --text as well", repeated_command=sample()
    ),
    "images to begin with and images to inpaint": Mistake(
        sample("--init", "a.npz", "--inpaint", "a.npz"),
        3,
        "either --init or --inpaint",
        repeated_command=sample(),
    ),
    "a setting that nobody knows": Mistake(
        sample("--set", "speed=9"), 3, "NAME one of", repeated_command=sample("--set", "batch=2")
    ),
    "a setting given twice": Mistake(
        sample("--set", "batch=2", "--set", "batch=3"),
        3,
        "the name once",
        repeated_command=sample("--set", "batch=2"),
    ),
    "a prior without weight": Mistake(
        sample("--prior", "north=0,south=0"),
        3,
        "at least one weight above 0",
        repeated_command=sample("--prior", "north=0,south=1"),
    ),
    "a memory that is no size": Mistake(
        sample("--memory", "much"),
        3,
        "such as 2GiB",
        repeated_command=sample("--memory", "2GiB"),
    ),
    "a memory that is too small": Mistake(
        sample("--memory", "1MiB"),
        37,
        "--memory",
        repeated_command=sample("--memory", "2GiB"),
    ),
    "a strategy with the setting of another": Mistake(
        sample("--strategy", "full", "--top-k", 1),
        3,
        "--strategy",
        repeated_command=sample("--strategy", "top-k", "--top-k", 1),
    ),
    "images of another size to begin with": Mistake(
        lambda w: sample("--init", w.path / "start.npz", "--t-start", 0.5)(w),
        7,
        "to do:",
        save_arrays("start.npz", images=np.zeros((1, 1, 8, 8), np.float32)),
        save_arrays("start.npz", images=np.zeros((1, 1, 4, 4), np.float32)),
    ),
    "a root that is not there": Mistake(
        lambda w: ["ddm", "verify", w.path / "release", "--root", w.path / "gone.json"],
        4,
        "Ask the federation's operator",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "a quorum without witnesses": Mistake(
        lambda w: ["ddm", "verify", *w.release("--quorum", 1)],
        3,
        "--witness as well",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "a memory of versions where a file is": Mistake(
        lambda w: ["ddm", "verify", *w.release("--state", w.path / "pass")],
        3,
        "Name another folder with --state",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "a hidden file in a release": Mistake(
        lambda w: ["ddm", "verify", *w.release()],
        18,
        "ls -AR",
        write_bytes("release/targets/.gitattributes", b"*.safetensors filter=lfs\n"),
        remove_file("release/targets/.gitattributes"),
    ),
    "a release without one of its files": Mistake(
        lambda w: ["ddm", "verify", *w.release()],
        16,
        "Fetch it again",
        move_file("release/metadata/timestamp.json", "usb"),
        move_file("usb", "release/metadata/timestamp.json"),
    ),
    "metadata with line ends of Windows": Mistake(
        lambda w: ["ddm", "verify", *w.release()],
        21,
        "in a zip archive",
        in_turn(
            copy_file("release/metadata/timestamp.json", "backup"),
            rewrite("backup", "release/metadata/timestamp.json", lambda data: data + b"\r\n"),
        ),
        copy_file("backup", "release/metadata/timestamp.json"),
    ),
    # Evaluating
    "neither a number of samples nor a file": Mistake(
        lambda w: ["ddm", "evaluate", *w.release(), "--reference", w.path / "real.npz"],
        3,
        "Add --num N",
        save_arrays("real.npz", images=REAL),
        repeated_command=evaluate(),
    ),
    "a strategy for samples that are there": Mistake(
        evaluate_file("drawn.npz", "--strategy", "full"),
        3,
        "either --strategy or --samples",
        in_turn(save_arrays("real.npz", images=REAL), save_arrays("drawn.npz", images=SAMPLES)),
        repeated_command=evaluate_file("drawn.npz"),
    ),
    "a page that is called a file": Mistake(
        lambda w: evaluate("--out", w.path / "page.html")(w),
        3,
        "a folder, by a name without ending",
        save_arrays("real.npz", images=REAL),
        repeated_command=lambda w: evaluate("--out", w.path / "page")(w),
    ),
    "a column that is not in the reference": Mistake(
        evaluate("--by", "ward"),
        7,
        "leave --by out",
        save_arrays("real.npz", images=REAL),
        repeated_command=evaluate(),
    ),
    "features that are of no form": Mistake(
        evaluate("--features", "inception"),
        4,
        "one of: encoder",
        save_arrays("real.npz", images=REAL),
        repeated_command=evaluate("--features", "encoder"),
    ),
    "a reference of another shape": Mistake(
        evaluate(),
        7,
        "to do:",
        save_arrays("real.npz", images=np.zeros((48, 1, 8, 8), np.float32)),
        save_arrays("real.npz", images=REAL),
    ),
    "a reference beyond the plan's range": Mistake(
        evaluate(),
        7,
        "Scale the images to this range",
        save_arrays("real.npz", images=REAL * 255),
        save_arrays("real.npz", images=REAL),
    ),
    "a reference with NaN": Mistake(
        evaluate(),
        7,
        "or leave them out",
        save_arrays("real.npz", images=np.full((48, 1, 4, 4), np.nan, np.float32)),
        save_arrays("real.npz", images=REAL),
    ),
    "a reference of complex numbers": Mistake(
        evaluate(),
        7,
        "to do:",
        save_arrays("real.npz", images=REAL.astype(np.complex64)),
        save_arrays("real.npz", images=REAL),
    ),
    "a reference under another name": Mistake(
        evaluate(),
        7,
        "an array called images",
        save_arrays("real.npz", pictures=REAL),
        save_arrays("real.npz", images=REAL),
    ),
    "a reference that was cut short": Mistake(
        evaluate(),
        7,
        "Copy the file again",
        in_turn(
            save_arrays("real.npz", images=REAL),
            rewrite("real.npz", "real.npz", lambda data: data[: len(data) // 2]),
        ),
        save_arrays("real.npz", images=REAL),
    ),
    "samples beyond the plan's range": Mistake(
        evaluate_file("drawn.npz"),
        7,
        "Scale them",
        in_turn(
            save_arrays("real.npz", images=REAL), save_arrays("drawn.npz", images=SAMPLES * 99)
        ),
        save_arrays("drawn.npz", images=SAMPLES),
    ),
    "an evaluation above its memory": Mistake(
        evaluate("--memory", "200MiB"),
        37,
        "raise the limit with --memory",
        save_arrays("real.npz", images=REAL),
        repeated_command=evaluate("--memory", "4GiB"),
    ),
    "a classifier saved from a compiled network": Mistake(
        lambda w: evaluate("--features", w.path / "net.safetensors")(w),
        22,
        "net._orig_mod.state_dict()",
        in_turn(
            save_arrays("real.npz", images=REAL),
            save_classifier("net.safetensors", "_orig_mod."),
        ),
        copy_file("plain.safetensors", "net.safetensors"),
    ),
    "a pickle for a classifier": Mistake(
        lambda w: evaluate("--features", w.path / "net.safetensors")(w),
        22,
        "weights_only=True",
        in_turn(
            save_arrays("real.npz", images=REAL),
            save_classifier("other.safetensors"),
            write_bytes("net.safetensors", pickle.dumps({"weight": [0.0] * 64})),
        ),
        copy_file("plain.safetensors", "net.safetensors"),
    ),
    # Students and islands
    "a student in a file of another ending": Mistake(
        lambda w: ["ddm", "distill", *w.release("--out", w.path / "student.pt")],
        3,
        ".safetensors",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "own samples and public images at once": Mistake(
        lambda w: [
            *("ddm", "distill", *w.release("--out", w.path / "s.safetensors")),
            *("--data", w.path / "north.npz", "--num", 8),
        ],
        3,
        "either --num",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "training before the split": Mistake(
        lambda w: ["ddm", "train", w.path / "islands"],
        4,
        "ddm split --data PATH",
        repeated_command=lambda w: [
            *("ddm", "split", "--data", w.path / "own.npz", "--recipe", w.path / "own.toml"),
            *("--islands", 2, "--out", w.path / "islands", *w.secret),
        ],
        prepare=own_data,
    ),
    "training an island before the seed": Mistake(
        lambda w: ["ddm", "train", w.path / "islands", "--island", 0],
        3,
        "--seed-only",
        repeated_command=lambda w: ["ddm", "train", w.path / "islands", "--seed-only"],
        prepare=own_islands_with_a_seed,
    ),
    "a split over a folder that is there": Mistake(
        lambda w: [
            *("ddm", "split", "--data", w.path / "own.npz", "--recipe", w.path / "own.toml"),
            *("--islands", 2, "--out", w.path / "release", *w.secret),
        ],
        6,
        "Choose another folder",
        prepare=own_data,
        repeated_command=lambda w: [
            *("ddm", "split", "--data", w.path / "own.npz", "--recipe", w.path / "own.toml"),
            *("--islands", 2, "--out", w.path / "islands", *w.secret),
        ],
    ),
    # Images of a site
    "a scan of nothing": Mistake(
        lambda w: ["silo", "scan"], 3, "Name them with --data", repeated_command=scan_of_pictures
    ),
    "a preview without a plan": Mistake(
        lambda w: [*scan_of_pictures(w), "--preview", w.path / "sheet.png"],
        3,
        "Add the other one",
        repeated_command=scan_of_pictures,
    ),
    "pictures of a review before the first scan": Mistake(
        lambda w: ["silo", "review", w.north, "--images", "--list"],
        4,
        "Scan first",
        repeated_command=lambda w: ["silo", "scan", w.north],
    ),
    "options that belong to the images": Mistake(
        lambda w: ["silo", "review", w.north, "--clear", "1"],
        3,
        "silo review SITE --images",
        repeated_command=lambda w: ["silo", "review", w.north],
    ),
    # A site's commands
    "more patients than images": Mistake(
        lambda w: w.enroll("--images", 2, "--patients", 3, *w.secret),
        3,
        "at most as many patients as images",
        repeated_command=lambda w: w.enroll("--images", 40, "--patients", 30, *w.secret),
    ),
    "a waiver until yesterday": Mistake(
        lambda w: [
            *("silo", "waive", w.north, "--role", "head", "--reason", "a test"),
            *("--until", "2020-01-01"),
        ],
        3,
        "a day in the future",
        repeated_command=lambda w: [
            *("silo", "waive", w.north, "--role", "head", "--reason", "a test"),
            *("--until", "2099-01-01"),
        ],
    ),
    "a waiver until some day": Mistake(
        lambda w: [
            *("silo", "waive", w.north, "--role", "head", "--reason", "a test"),
            *("--until", "soon"),
        ],
        3,
        "a day such as",
        repeated_command=lambda w: [
            *("silo", "waive", w.north, "--role", "head", "--reason", "a test"),
            *("--until", "2099-01-01"),
        ],
    ),
    "a waiver before the first plan": Mistake(
        lambda w: [
            *("silo", "waive", w.path / "west", "--role", "head", "--reason", "a test"),
            *("--until", "2099-01-01"),
        ],
        3,
        "--plan-digest",
        prepare=lambda w: run_command(*w.init("west")),
        repeated_command=lambda w: [
            *("silo", "waive", w.path / "west", "--role", "head", "--reason", "a test"),
            *("--until", "2099-01-01", "--plan-digest", "0" * 64),
        ],
    ),
    "an approval despite a failure that has no reason": Mistake(
        lambda w: ["silo", "approve", w.north, "--digest", w.digest, "--despite-fail"],
        3,
        "--role and --reason together",
        repeated_command=lambda w: ["silo", "approve", w.north, "--digest", w.digest],
    ),
    "an approval despite a failure that did not happen": Mistake(
        lambda w: [
            *("silo", "approve", w.north, "--digest", w.digest, "--despite-fail"),
            *("--role", "head", "--reason", "a test"),
        ],
        34,
        "Approve without --despite-fail",
        repeated_command=lambda w: ["silo", "approve", w.north, "--digest", w.digest],
    ),
    "a service for containers with users": Mistake(
        lambda w: [
            *("silo", "service", w.north, "--out", w.path / "units", "--kind", "containers"),
            *("--worker-user", "a", "--courier-user", "b"),
        ],
        3,
        "Leave them out",
        repeated_command=status_command,
    ),
    "a service without a passphrase file": Mistake(
        lambda w: ["silo", "service", w.north, "--out", w.path / "units"],
        3,
        "Add passphrase_file",
        remedy=lambda w: (w.north / "silo.toml").write_text(
            f'passphrase_file = "{w.path / "pass"}"\n' + (w.north / "silo.toml").read_text("utf-8"),
            "utf-8",
        ),
        # The site's folder of a test is one that both halves may not share.
        repeated_command=status_command,
    ),
    # Files that travel by mail
    "a card with a byte order mark": Mistake(
        enroll_card("mailed.json"),
        21,
        "in a zip archive",
        rewrite("north.card.json", "mailed.json", lambda data: codecs.BOM_UTF8 + data),
        repeated_command=enroll_card("north.card.json"),
    ),
    "a card with line ends of Windows": Mistake(
        enroll_card("mailed.json"),
        21,
        "in a zip archive",
        rewrite("north.card.json", "mailed.json", lambda data: data + b"\r\n"),
        repeated_command=enroll_card("north.card.json"),
    ),
    "a card saved as UTF-16": Mistake(
        enroll_card("mailed.json"),
        21,
        "in a zip archive",
        rewrite("north.card.json", "mailed.json", lambda data: data.decode().encode("utf-16")),
        repeated_command=enroll_card("north.card.json"),
    ),
    "an invitation with a byte order mark": Mistake(
        lambda w: w.init(invitation=w.path / "mailed.json"),
        21,
        "in a zip archive",
        rewrite("fed/invitation.json", "mailed.json", lambda data: codecs.BOM_UTF8 + data),
        repeated_command=lambda w: w.init(),
    ),
    # A federation's commands
    "a plan without images and without an earlier plan": Mistake(
        lambda w: [
            *("aggregator", "plan", w.fed, "--recipe", w.path / "plan.toml", *w.secret, "--yes")
        ],
        3,
        "aggregator plan FED --recipe FILE --public FILE",
        prepare=lambda w: w.plan(),
        repeated_command=plan_as_usual,
    ),
    "an encoder of more directions than the images span": Mistake(
        plan_with("changed.toml"),
        7,
        "lower encoder.dim",
        with_recipe(encoder={"kind": "pca", "dim": 17}),
        with_recipe(encoder={"kind": "pca", "dim": 4}),
    ),
    "more groups than fine centroids": Mistake(
        plan_with("changed.toml"),
        3,
        "the table [clustering]",
        with_recipe(clustering={"num_fine": 3, "num_coarse": 2}),
        with_recipe(clustering={"num_fine": 8, "num_coarse": 2}),
    ),
    "more fine centroids than public images": Mistake(
        plan_with("changed.toml"),
        7,
        "lower clustering.num_fine",
        with_recipe(clustering={"num_fine": 500, "num_coarse": 2}),
        with_recipe(clustering={"num_fine": 8, "num_coarse": 2}),
    ),
    "more images than a card allows": Mistake(
        plan_with("changed.toml"),
        3,
        "Lower partition.min_images",
        with_recipe(partition={"kind": "silo", "min_images": 4000}),
        with_recipe(partition={"kind": "silo", "min_images": 10}),
    ),
    "a decision about a silo that does not wait": Mistake(
        lambda w: ["aggregator", "admit", w.fed, "north", "--reason", "a test"],
        3,
        "List what waits",
        repeated_command=lambda w: ["aggregator", "quarantine", w.fed],
    ),
    "a change to complete where none waits": Mistake(
        lambda w: ["aggregator", "complete", w.fed, *w.secret],
        4,
        "There is nothing to complete",
        repeated_command=federation_status,
    ),
    "a silo that nobody enrolled": Mistake(
        lambda w: ["aggregator", "remove", w.fed, "mars", "--reason", "a test", *w.secret],
        4,
        "Check the name",
        repeated_command=federation_status,
    ),
    "a page and a document at once": Mistake(
        lambda w: ["aggregator", "status", w.fed, "--json", "--serve"],
        3,
        "Leave one out",
        repeated_command=lambda w: ["aggregator", "status", w.fed, "--json"],
    ),
    "a page for every machine": Mistake(
        lambda w: ["aggregator", "status", w.fed, "--serve", "--address", "0.0.0.0:0"],
        31,
        "ssh -L",
        repeated_command=federation_status,
    ),
    "an address for the page without a port": Mistake(
        lambda w: ["aggregator", "status", w.fed, "--serve", "--address", "here"],
        3,
        "--address",
        repeated_command=federation_status,
    ),
    "keys of silos as text": Mistake(
        lambda w: ["ddm", "verify", *w.release("--silo-key", "north")],
        3,
        "ID=FINGERPRINT",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
}
"""By the state in words; the message is a part of the remedy or of what was expected."""
