"""Numbers that somebody else chose: a plan or a release may name any size, and costs no more than refusing it."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

import silo.plan.acceptance
from ddm.cli.main import app
from ddm.distillation.student import OwnSamples, Student, StudentOrigin
from ddm.errors import ArchipelagoError, MemoryLimitError
from ddm.loading.ensemble import load_ensemble
from ddm.loading.release import Release, open_release
from ddm.protocol.architecture import Dit
from ddm.protocol.base import File
from ddm.protocol.data import DataSpec
from ddm.protocol.learning import UniformT
from ddm.protocol.plan import Plan
from ddm.system.monai import monai_networks
from ddm.trust.keys import SigningKey
from silo.config import Site
from silo.plan.attempts import MAX_LOST_ATTEMPTS
from silo.worker.state import Problem, State, load_state, state_path
from silo.worker.worker import Worker
from tests.conftest import PublishedRelease
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.dishonest_aggregator import (
    PUBLIC,
    SIDE,
    SILO,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
)
from tests.support.documents import to_bytes
from tests.support.forked import fork_process, wait_for_exit

MIB = 512
CPU_S = 10  # what refusing a plan or a release may cost, on top of the program itself
HONEST = UnsignedPlan.honest(clusters_around(PUBLIC[:8]))
KEY = SigningKey.generate()
EXPERT = "expert.architecture"
TRAINING = "expert.training"


def asking(**changes: object) -> UnsignedPlan:
    """The honest plan with other values, by their dotted names with __ for dots."""
    plan = HONEST.copy()
    for name, value in changes.items():
        *parents, last = name.split("__")
        table: Any = plan.document
        for parent in parents:
            table = table[parent]
        table[last] = value
    return plan


def dit(patch: int, hidden: int, depth: int = 2, heads: int = 16) -> dict[str, object]:
    return {"kind": "dit", "patch": patch, "hidden": hidden, "depth": depth, "heads": heads}


def timm(side: int, **changes: object) -> dict[str, object]:
    sizes = {
        "kind": "timm",
        "dim": 384,
        "model": "vit_small_patch16_224",
        "image_size": [side, side],
    }
    return {**sizes, "path": "plan/encoder.safetensors", "mean": [0.5], "std": [0.5], **changes}


PIXELS = {
    "data": {"shape": [1, 65536, 65536], "range": [-1.0, 1.0]},
    "expert__architecture": dit(2, 64),
}
SQUARE = {"shape": [1, 1024, 1024], "range": [-1.0, 1.0]}
UNET = {"kind": "unet", "channels": [4096] * 3, "attention": [True] * 3, "num_res_blocks": 16}
LORA = {"kind": "lora", "rank": 8, "alpha": 8.0}
TEXT = {"kind": "text", "dim": 16384, "max_tokens": 4096}
LATENT = {
    "kind": "autoencoder_kl",
    "channels": [4096] * 3,
    "attention": [True] * 3,
    "latent_channels": 4,
    "scale": 1.0,
}
MANY = {"num_fine": 65536, "num_coarse": 1}

# What is asked for, the code of the refusal, and words that it must have.
SIZES: dict[str, tuple[UnsignedPlan, int, tuple[str, ...]]] = {
    "sides of 65,536": (
        asking(**PIXELS),
        31,
        ("values of one sample", "max_sample_values", "policy.toml"),
    ),
    "1,024 x 1,024 at width 1,024": (
        asking(data=SQUARE, expert__architecture=dit(1, 1024)),
        31,
        (
            "tokens x width of the expert (dit)",
            "at most 134217728",
            "got 1073741824",
            "max_layer_values",
        ),
    ),
    "more parameters than memory": (
        asking(expert__architecture=dit(2, 8192, 128, 128), limits__expert_bytes=2**40),
        31,
        ("parameters of an expert", "max_parameters"),
    ),
    "covariances of 4,096 groups in 1,024 dimensions": (
        asking(
            clustering=MANY,
            statistics__counts={"epsilon": 1.0, "num_groups": 4096},
            sketch__rank=1024,
        ),
        31,
        ("plan/sketch.safetensors", "max_file_bytes"),
    ),
    "a batch of a million": (
        asking(expert__training__batch_size=2**20),
        31,
        ("memory of a training step",),
    ),
    "U-Net of 4,096 channels": (
        asking(expert__architecture=UNET),
        31,
        ("parameters of an expert",),
    ),
    "texts of 4,096 tokens of 16,384": (
        asking(condition=TEXT, expert__training__batch_size=4096),
        31,
        ("memory of",),
    ),
    "autoencoder of 4,096 channels": (asking(latent=LATENT), 21, ("must be listed",)),
    "network of timm on 4,096 pixels": (asking(encoder=timm(4096)), 21, ("image_size",)),
    "network of timm on images a pixel high": (
        asking(
            encoder=timm(1024),
            data={"shape": [1, 1, 65536], "range": [-1.0, 1.0]},
            expert__architecture=dit(1, 64),
        ),
        31,
        ("tokens x width of the encoder (timm)", "max_layer_values"),
    ),
    "network of timm that divides by zero": (asking(encoder=timm(224, std=[0.0])), 21, ("std",)),
    "expert that starts from the encoder's file": (
        asking(expert__adaptation={**LORA, "base": "plan/encoder.safetensors"}),
        21,
        ("each part must have a file of its own",),
    ),
    "expert that starts from plan.json": (
        asking(expert__adaptation={**LORA, "base": "plan.json"}),
        21,
        ("must be listed",),
    ),
    "silos beyond any federation": (
        asking(silos=[f"s{n:05}" for n in range(30_000)]),
        21,
        ("silos",),
    ),
    "classes as many as fit": (
        asking(statistics__class_counts={"epsilon": 0.5, "num_classes": 2**52}),
        21,
        ("num_classes",),
    ),
    "learning rate beyond float32": (
        asking(expert__training__learning_rate=1e38),
        21,
        ("learning_rate",),
    ),
    "range from minus to plus 1e308": (asking(data__range=[-1e308, 1e308]), 21, ("range",)),
}
# Texts in the place of the number of training steps.
WRITTEN: dict[str, bytes] = {
    "negative": b"-1",
    "zero": b"0",
    "truth value": b"true",
    "text": b'"1500"',
    "list": b"[1500]",
    "null": b"null",
    "fraction": b"1500.5",
    "beyond 53 bits": b"9007199254740993",
    "beyond 64 bits": b"18446744073709551616",
    "exponent beyond any float": b"1e400",
    "exponent of 4,000 digits": b"1e" + b"9" * 4000,
    "5,000 digits": b"9" * 5000,
    "million digits": b"9" * 1_000_000,
    "NaN": b"NaN",
    "infinity": b"Infinity",
    "minus infinity": b"-Infinity",
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "levels that never end": b'{"a":' * 100_000,
    "as many values as fit": b"[" + b"0," * 500_000 + b"0]",
    "text of 10 MB": b'"' + b"a" * 10_000_000 + b'"',
    "text of 10 MB in four-byte signs": b'"' + "\U0001f600".encode() * 2_500_000 + b'"',
    "half of a sign": b'"\\ud800"',
    "bytes that are no text": b'"\xff\xfe\x80"',
    "sign that ends a line": b'"\\u0000\\u2028\\u202e"',
}


@pytest.fixture(scope="module")
def hostile(aggregator: DishonestAggregator) -> DishonestAggregator:
    """A federation whose site can run its worker."""
    aggregator.keys[SILO] = KEY
    settings = (
        f'silo_id = "{SILO}"\ndata = "none.npz"\nfederation = "digits"\naddress = "localhost:1"\n'
    )
    (aggregator.site.path / "silo.toml").write_text(settings + f'root_digest = "{"0" * 64}"\n')
    aggregator.keys[SILO] = KEY
    declared = f'[data]\nkind = "arrays"\nshape = [1, {SIDE}, {SIDE}]\nrange = [-1.0, 1.0]\n'
    allowed = '[training]\narchitectures = ["dit", "mmdit", "unet"]\n[privacy]\nunit = "image"\n'
    (aggregator.site.path / "policy.toml").write_text(declared + allowed)
    return aggregator


@pytest.fixture
def site(hostile: DishonestAggregator) -> Iterator[Site]:
    """Its site with an empty inbox, on which nothing has happened yet."""
    yield hostile.site
    for folder in (
        hostile.site.inbox,
        hostile.site.private / "checkpoints",
        hostile.site.private / "plans",
    ):
        shutil.rmtree(folder, ignore_errors=True)
    hostile.site.inbox.mkdir()
    state_path(hostile.site.private).unlink(missing_ok=True)


def worked(site: Site, until: str = "plan_refused", *, restarts: int = 1) -> State:
    """Run the worker as `silo run` does, and again, until it has said `until`; an exception ends the test."""
    for _ in range(1 + restarts):
        stopping = Event()

        def heard(state: State, stopping: Event = stopping) -> None:
            if state.state == until:
                stopping.set()

        with pytest.raises(KeyboardInterrupt):
            Worker(site, KEY, heard, stopping=stopping).run()
    return load_state(state_path(site.private))


def refusals(site: Site, plan_ids: list[str]) -> dict[str, Problem]:
    """Let the worker look at plan after plan in a process of its own that is measured; return why it refused each."""
    report = site.path / "told.json"

    def look() -> None:
        problems = dict[str, str]()
        stopping = Event()

        def heard(state: State) -> None:
            if state.plan_id and state.problem:
                problems[state.plan_id] = state.problem.encode().decode()
            if len(problems) == len(plan_ids) or state.state == "plan_accepted":
                report.write_text(json.dumps(problems))
                stopping.set()

        with pytest.raises(KeyboardInterrupt):
            Worker(site, KEY, heard, stopping=stopping).run()

    monai_networks("architecture unet")  # what is imported at the first use is no cost of a plan
    outcome = attempt(look, mib=MIB, cpu_s=CPU_S)
    assert (outcome.error, outcome.message) == (None, "")
    assert outcome.mib <= MIB
    assert outcome.cpu_s <= CPU_S
    assert not list((site.private / "attempts").iterdir())
    assert not list((site.private / "plans").iterdir())
    problems: dict[str, str] = json.loads(report.read_text())
    assert list(problems) == plan_ids
    return {
        plan_id: Problem.parse(text.encode(), subject="told") for plan_id, text in problems.items()
    }


@pytest.mark.measured
def test_plan_of_vast_sizes_is_refused_by_arithmetic_alone(
    hostile: DishonestAggregator, site: Site
) -> None:
    offered = {hostile.deliver(plan): attack for attack, (plan, _, _) in SIZES.items()}
    for plan_id, problem in refusals(site, list(offered)).items():
        _, code, words = SIZES[offered[plan_id]]
        with case(attack=offered[plan_id]):
            assert problem.code == code, problem.message
            assert all(word in problem.message for word in words), problem.message


@pytest.mark.measured
def test_plan_with_an_unreadable_number_is_refused(
    hostile: DishonestAggregator, site: Site
) -> None:
    old = b'"num_steps": 1500'
    offered = dict[str, str]()
    assert old in to_bytes(HONEST.document)
    for attack, written in WRITTEN.items():
        new = b'"num_steps": ' + written
        offered[hostile.deliver(HONEST, rewrite=lambda data, new=new: data.replace(old, new))] = (
            attack
        )
    for plan_id, problem in refusals(site, list(offered)).items():
        with case(attack=offered[plan_id]):
            assert problem.code in (20, 21), problem.message
            assert all(sign.isprintable() for sign in problem.message)


def test_plan_of_vast_sizes_is_refused_again_after_a_restart(
    hostile: DishonestAggregator, site: Site
) -> None:
    hostile.deliver(asking(**PIXELS))
    state = worked(site, restarts=2)
    assert state.problem is not None and state.problem.code == 31


def test_control_honest_plan_is_taken_beside_hostile_ones(
    hostile: DishonestAggregator, site: Site
) -> None:
    hostile.deliver(asking(**PIXELS))
    hostile.deliver(asking(data__range=[-1e308, 1e308]))
    plan_id = hostile.deliver(HONEST)
    assert worked(site, "plan_accepted", restarts=0).plan_id == plan_id


FAILURES: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: MemoryError("secret"),
    "recursion": lambda: RecursionError("secret"),
    "overflow": lambda: OverflowError("secret"),
    "allocator of torch": lambda: RuntimeError(
        "secret: you tried to allocate 17592186044416 bytes"
    ),
    "memory of a GPU": lambda: torch.OutOfMemoryError("secret"),
    "value": lambda: ValueError("secret"),
    "key": lambda: KeyError("secret"),
    "text": lambda: UnicodeEncodeError("utf-8", "secret\ud800", 0, 1, "secret"),
    "name that is too long": lambda: OSError(errno.ENAMETOOLONG, "secret"),
    "address beyond the file": lambda: OSError(errno.EINVAL, "secret"),
}


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]) -> None:
    def fail(*arguments: object, **named: object) -> NoReturn:
        raise error()

    monkeypatch.setattr(silo.plan.acceptance, "check_plan", fail)


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_is_raised_while_a_plan_is_looked_at_is_a_refusal_and_the_next_plan_is_taken(
    hostile: DishonestAggregator,
    site: Site,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hostile.deliver(HONEST)
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR, "silo"):
        failing(broken, FAILURES[failure])
        problem = worked(site).problem
    assert problem is not None
    assert problem.code == 24
    name = type(FAILURES[failure]()).__name__
    assert f"got {name} while it was read or checked" in problem.message
    assert "secret" not in problem.message
    assert [record.exc_info[0].__name__ for record in caplog.records if record.exc_info] == [
        name,
        name,
    ]
    plan_id = hostile.deliver(HONEST)
    shutil.rmtree(site.inbox / str(load_state(state_path(site.private)).plan_id))
    assert worked(site, "plan_accepted", restarts=0).plan_id == plan_id


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_fault_of_the_sites_own_machine_is_not_blamed_on_the_plan(
    hostile: DishonestAggregator, site: Site, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.deliver(HONEST)
    failing(monkeypatch, lambda: OSError(fault, os.strerror(fault)))
    with pytest.raises(OSError, match=os.strerror(fault)):
        Worker(site, KEY, lambda state: None).run()
    assert load_state(state_path(site.private)).state == "waiting"
    monkeypatch.undo()
    assert worked(site, "plan_accepted", restarts=0).state == "plan_accepted"


def test_signal_in_the_middle_of_a_look_ends_the_worker_and_refuses_nothing(
    hostile: DishonestAggregator, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.deliver(HONEST)
    failing(monkeypatch, KeyboardInterrupt)
    for _ in range(MAX_LOST_ATTEMPTS + 1):
        with pytest.raises(KeyboardInterrupt):
            Worker(site, KEY, lambda state: None).run()
    monkeypatch.undo()
    assert worked(site, "plan_accepted", restarts=0).state == "plan_accepted"


def test_plan_that_takes_the_process_with_it_each_time_is_refused_without_another_look(
    hostile: DishonestAggregator, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel does where memory runs out leaves no exception behind."""
    plan_id = hostile.deliver(HONEST)
    with monkeypatch.context() as broken:
        broken.setattr(silo.plan.acceptance, "check_plan", lambda *arguments, **named: os._exit(9))
        for _ in range(MAX_LOST_ATTEMPTS):
            assert wait_for_exit(fork_process(Worker(site, KEY, lambda state: None).run)) == 9
            assert load_state(state_path(site.private)).state == "waiting"
        problem = worked(site).problem
    assert problem is not None
    assert problem.code == 24
    assert "attempts that each ended the process" in problem.message
    (site.private / "attempts" / f"{plan_id}.json").unlink()
    assert worked(site, "plan_accepted", restarts=0).state == "plan_accepted"


def vast(opened: Release, **changes: object) -> Release:
    """The same release with other numbers in its plan, as an aggregator signs it that holds every key."""
    document = opened.plan.model_dump(mode="json")
    for name, value in changes.items():
        *parents, last = name.split("__")
        table: Any = document
        for parent in parents:
            table = table[parent]
        table[last] = value
    return replace(opened, plan=Plan.parse(to_bytes(document), subject="plan.json"))


VAST: dict[str, dict[str, object]] = {
    "1,024 x 1,024 at width 512": {"data": SQUARE, "expert__architecture": dit(1, 512)},
    "sides of 65,536": {
        "data": {"shape": [1, 65536, 65536], "range": [-1.0, 1.0]},
        "expert__architecture": dit(2, 64),
    },
    "groups in 1,024 dimensions": {
        "clustering": {**MANY, "path": "plan/centroids.safetensors"},
        "statistics__counts__num_groups": 4096,
        "sketch__rank": 1024,
    },
    "samples router": {
        "data": SQUARE,
        "router": {**dit(1, 256), "kind": "samples", "num_steps": 1, "images_per_expert": 2},
    },
}
ASKED = {
    "num": ("--num", 10**12),
    "batch": ("--num", 10**6, "--set", f"batch={10**6}"),
    "steps": ("--steps", 10_000),
}


@pytest.fixture
def opened(published_once: PublishedRelease) -> Release:
    return open_release(published_once.release, root=published_once.root, state=None)


def command(*words: object) -> None:
    """Run `ddm`; an error of ours leaves it as it is."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def refused_memory(act: Callable[[], object]) -> str:
    """Return the refusal of a call that is measured."""
    outcome = attempt(act, mib=MIB, cpu_s=CPU_S)
    assert outcome.error == MemoryLimitError.__name__, outcome
    assert outcome.mib <= MIB
    assert outcome.cpu_s <= CPU_S
    return outcome.message


@pytest.mark.measured
@pytest.mark.parametrize("attack", VAST)
def test_release_of_vast_sizes_is_refused_before_anything_in_it_is_loaded(
    opened: Release, attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = vast(opened, **VAST[attack])
    message = refused_memory(lambda: load_ensemble(hostile, memory_bytes=400 << 20))
    assert "at most 400.0 MiB of memory" in message and "needed" in message
    monkeypatch.setattr("ddm.cli.options.Verification.open", lambda *arguments, **named: hostile)
    common = ("nowhere", "--root", "nowhere", "--memory", "400MiB", "--device", "cpu")
    refused_memory(lambda: command("sample", *common, "--num", 64, "--out", tmp_path / "a.npz"))
    refused_memory(lambda: command("distill", *common, "--out", tmp_path / "a.safetensors"))


@pytest.mark.measured
@pytest.mark.parametrize("asked", ASKED)
def test_samples_beyond_the_memory_are_refused_with_what_to_change(
    published_once: PublishedRelease, asked: str, tmp_path: Path
) -> None:
    words = (
        published_once.release,
        "--root",
        published_once.root,
        "--state",
        tmp_path / "state",
        "--device",
        "cpu",
    )
    extra = ("--num", 10**6) if asked == "steps" else ()
    message = refused_memory(
        lambda: command(
            "sample",
            *words,
            "--out",
            tmp_path / "a.npz",
            "--memory",
            "256MiB",
            *extra,
            *ASKED[asked],
        )
    )
    assert "at most 256.0 MiB" in message


@pytest.mark.measured
def test_student_of_vast_sizes_is_refused_before_its_weights_are_read(
    tmp_path: Path, opened: Release
) -> None:
    record = Student(
        source=StudentOrigin(
            plan_id=opened.plan.plan_id, version=1, manifest="0" * 64, root="0" * 64
        ),
        images=OwnSamples(num=1, seed=0),
        teacher="label",
        data=DataSpec(shape=(1, 65536, 65536), range=(-1.0, 1.0)),
        architecture=Dit(patch=2, hidden=64, depth=1, heads=4),
        path="linear",
        t_distribution=UniformT(),
        training=opened.plan.expert.training,
        loss=0.0,
        seconds=0.0,
        file=File(path="student.safetensors", bytes=1, digest="0" * 64),
    )
    (tmp_path / "student.json").write_bytes(record.encode())
    (tmp_path / "student.safetensors").write_bytes(b"0")
    words = (
        tmp_path / "student.safetensors",
        "--num",
        1,
        "--out",
        tmp_path / "a.npz",
        "--device",
        "cpu",
    )
    assert "at most 256.0 MiB" in refused_memory(
        lambda: command("sample-student", *words, "--memory", "256MiB")
    )


@pytest.mark.measured
def test_verifying_and_showing_a_release_costs_nothing_that_its_plan_says(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    words = (published_once.release, "--root", published_once.root, "--state", tmp_path / "state")
    for name in ("verify", "info"):
        outcome = attempt(lambda name=name: command(name, *words), mib=MIB, cpu_s=CPU_S)  # type: ignore[misc]
        assert outcome.error is None, outcome
        assert outcome.mib <= MIB


def test_refusal_of_memory_says_what_is_needed_what_is_allowed_and_what_to_change(
    opened: Release,
) -> None:
    with pytest.raises(ArchipelagoError) as refusal:
        load_ensemble(vast(opened, **VAST["sides of 65,536"]), memory_bytes=1 << 30)
    assert "at most 1,024.0 MiB" in str(refusal.value)
    assert "memory_bytes" in refusal.value.remedy
    assert refusal.value.exit_code == 37
