"""Attacks on screening: experts that are honest but at some times, for some inputs or under some conditions.

The attacks on answers are those of examples/screening/measure.py, whose table stands in docs/explanation/screening.md.
"""

import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aggregator.intake.conditions import Answer
from aggregator.intake.quarantine import (
    QuarantineDecision,
    quarantined_submissions,
    record_decision,
)
from aggregator.intake.screening import copy_faults
from aggregator.intake.secret import SECRET_BYTES, load_screening_secret
from aggregator.intake.sweep import DEFAULT_STEPS, choose_times, num_rows_of_all_times
from aggregator.intake.trial import Trial
from ddm.diffusion.solver import uniform_times
from ddm.errors import SetupError
from ddm.protocol.architecture import TextCondition
from ddm.protocol.base import now_utc
from examples.screening.measure import (
    CLASSES,
    answer_attacks,
    answer_of,
    class_attacks,
    figures,
    judge,
    not_a_number,
    trial_of,
    where,
)
from tests.support.errors import has_subject
from tests.support.federation import PlannedFederation, TinyFederation, recipe
from tests.support.screening import ARCHITECTURE, SHAPE, TRAINING, make_wild_at, public_images
from tests.support.submissions import SILO, Arrival, arrive

DOC = Path(__file__).parents[2] / "docs" / "explanation" / "screening.md"
ANSWERS = answer_attacks(public_images())
OF_A_CLASS = class_attacks(public_images())
CAUGHT = {
    "output x 100 at t = 1": "high_loss_once",
    "output x 3 at t = 1": "high_loss_once",
    "output x 100 at one t of the default grid, 0.74": "high_loss_once",
    "output x 30 at half a default step, 0.33": "high_loss_once",
    "output x 3 for t in 0.9 to 1": "high_loss_once",
    "NaN below t = 0.3": "broken_images",
    "NaN at t = 0.02, the last default step": "high_loss_once",
    "one image for every input": "alike_images",
    "planted image for a third of the inputs, t below 0.6": "high_loss_once",
}
MISSED = [
    "output x 1.5 at t = 1",
    "output x 1.3 for t in 0.9 to 1",
    "output x 100 at one t of a grid of 37 steps, 1 - 1/37",
    "one image, only for t above 0.98",
    "planted image for 1 noise in 1,000",
    "planted image where a patch is bright (trigger pattern)",
]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A silo's submission of an expert that was trained long enough to draw images, and the plan's id."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("screening"), {SILO: 80})
    architecture = ARCHITECTURE.model_dump(mode="json")
    plan_id = tiny.sign(
        recipe(expert={"architecture": architecture, "training": TRAINING.model_dump(mode="json")})
    )
    (tiny.federation.keys / "screening.secret").write_bytes(bytes(SECRET_BYTES))
    tiny.deliver_plan(SILO, plan_id)
    tiny.work(SILO)
    return PlannedFederation(tiny, plan_id)


@pytest.fixture
def arrived(sent: PlannedFederation, tmp_path: Path) -> Arrival:
    return arrive(sent, tmp_path / "copy")


@pytest.fixture(scope="module")
def honest(sent: PlannedFederation) -> dict[str, Tensor]:
    tiny, plan_id = sent
    return load_file(next((tiny.sites[SILO].outbox / plan_id / "1").rglob("expert.safetensors")))


@pytest.fixture(scope="module")
def trial() -> Trial:
    return trial_of(public_images(), architecture=ARCHITECTURE)


def answers(weights: dict[str, Tensor]) -> Answer:
    unconditional = answer_of(weights, architecture=ARCHITECTURE, shape=SHAPE)
    return lambda x_B, t_B, c_B: unconditional(x_B, t_B, None)


def flags(weights: dict[str, Tensor], answer: Answer, trial: Trial) -> set[str]:
    return judge([], figures(weights, answer, trial, "cheat"), trial, TRAINING)


def send(arrived: Arrival, weights: dict[str, Tensor]) -> list[str]:
    """Sign and send other weights; return why they wait, or nothing where they were accepted."""
    save_file({name: value.contiguous() for name, value in weights.items()}, arrived.expert_path)
    arrived.rewrite(lambda document: None)
    receipts = arrived.tiny.take_in()
    waiting = quarantined_submissions(arrived.tiny.federation, arrived.plan_id)
    assert bool(waiting) != ([receipt.verdict.kind for receipt in receipts] == ["accepted"])
    return list(waiting[0].record.reasons) if waiting else []


def test_honest_expert_is_accepted_at_once(arrived: Arrival, honest: dict[str, Tensor]) -> None:
    """The control."""
    assert send(arrived, honest) == []


@pytest.mark.parametrize("t", [1.0, 0.5])
def test_weights_changed_so_that_one_time_of_the_default_grid_is_wild_wait_for_a_person(
    arrived: Arrival, honest: dict[str, Tensor], t: float
) -> None:
    """The attack that passed: the tested times were public, and none was a solver's."""
    weights = make_wild_at(honest, t, 100.0)
    before = answers(honest)
    after = answers(weights)
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    near = torch.full((4,), t - 0.0016)
    assert float((before(x, near, None) - after(x, near, None)).norm()) < 0.4 * float(
        before(x, near, None).norm()
    )
    assert float(after(x, torch.full((4,), t), None).norm()) > 30 * float(
        before(x, torch.full((4,), t), None).norm()
    )
    reasons = send(arrived, weights)
    # The worst of the tested times is named: the grid's own, or a random one that happens to be as near.
    named = [
        stated_time[1]
        for reason in reasons
        if (stated_time := re.search(r"at t ([.0-9]+) its loss is .* times the limit", reason))
    ]
    assert any(abs(float(time) - t) < 0.0016 for time in named), reasons
    assert not any("grew by" in reason for reason in reasons), (
        "each tensor is as large as training may make it"
    )


@pytest.mark.parametrize("what", CAUGHT)
def test_attack_on_some_answers_is_flagged(
    what: str, honest: dict[str, Tensor], trial: Trial
) -> None:
    assert flags(honest, answers(honest), trial) == set()
    assert CAUGHT[what] in flags(honest, ANSWERS[what](answers(honest)), trial)


@pytest.mark.parametrize("what", MISSED)
def test_attack_that_the_documentation_states_as_missed_is_missed(
    what: str, honest: dict[str, Tensor], trial: Trial
) -> None:
    """Not a wish: where one of these is found one day, the table says too little."""
    assert flags(honest, ANSWERS[what](answers(honest)), trial) == set()


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("one class: output x 100 at t = 1", "high_loss_once"),
        ("one class: NaN", "high_loss_once"),
        ("one class: one image", "high_loss_once"),
        ("one class: answers of another class", None),
    ],
)
def test_attack_on_one_class_is_flagged_unless_it_only_confuses_classes(
    what: str, rule: str | None, honest: dict[str, Tensor]
) -> None:
    trial = trial_of(public_images(), CLASSES, ARCHITECTURE)
    assert flags(honest, answers(honest), trial) == set()
    assert flags(honest, OF_A_CLASS[what](answers(honest)), trial) >= ({rule} if rule else set())


def test_expert_that_breaks_under_every_text_is_flagged(honest: dict[str, Tensor]) -> None:
    trial = trial_of(public_images(), TextCondition(dim=8, max_tokens=4), ARCHITECTURE)
    assert flags(honest, answers(honest), trial) == set()
    broken = where(lambda x, t, c: torch.full((len(x),), c is not None), not_a_number)
    assert flags(honest, broken(answers(honest)), trial) == {"high_loss_once", "broken_images"}


def test_pair_of_silos_that_send_one_expert_with_slightly_opposite_biases_is_found(
    honest: dict[str, Tensor], trial: Trial
) -> None:
    answer = answers(honest)
    bias = 0.01 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    plus, minus = (
        figures(honest, lambda x, t, c, sign=sign: answer(x, t, c) + sign * bias, trial, name)
        for name, sign in (("plus", 1.0), ("minus", -1.0))
    )
    assert [fault.flag for fault in copy_faults(minus, {"other": [plus]}, TRAINING)] == ["copy"]


def test_silo_does_not_know_the_times_and_noise_of_its_own_trial(trial: Trial) -> None:
    """Another secret or another digest gives another trial; the same ones the same, also after a restart."""

    def asked(trial: Trial, *submission: str) -> Tensor:
        seen: list[Tensor] = []

        def answer(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
            seen.append(t_B)
            return torch.zeros_like(x_B)

        trial.measure(answer, *submission)
        return torch.cat(seen)

    secret = trial_of(public_images(), architecture=ARCHITECTURE, seed=1)
    first = asked(trial, SILO, "a" * 64, SILO)
    assert torch.equal(
        first, asked(trial_of(public_images(), architecture=ARCHITECTURE), SILO, "a" * 64, SILO)
    )
    for other in (asked(secret, SILO, "a" * 64, SILO), asked(trial, SILO, "b" * 64, SILO)):
        assert other.shape == first.shape and not torch.equal(other, first)
    compared = len(trial.probe.t)
    assert torch.equal(first[:compared], asked(trial, SILO, "b" * 64, SILO)[:compared]), (
        "copies need common images"
    )
    assert not torch.equal(first[:compared], asked(secret, SILO, "a" * 64, SILO)[:compared])


@pytest.mark.parametrize("num_rows", [64, num_rows_of_all_times()])
def test_every_time_of_the_default_grid_is_tested_whatever_an_expert_costs(num_rows: int) -> None:
    times = choose_times(np.random.default_rng(0), num_rows)
    assert len(times) == num_rows and set(uniform_times(DEFAULT_STEPS)) <= set(times)
    assert (
        len(
            set(times)
            - {n / 1000 for n in range(1001)}
            - set(uniform_times(24))
            - set(uniform_times(16))
        )
        >= 5
    )


def test_secret_is_made_once_for_the_operator_alone_and_leaves_with_nothing(
    arrived: Arrival, honest
) -> None:
    federation = arrived.tiny.federation
    path = federation.keys / "screening.secret"
    path.unlink()
    secret = load_screening_secret(federation)
    assert len(secret) == SECRET_BYTES and load_screening_secret(federation) == secret != bytes(
        SECRET_BYTES
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    send(arrived, honest)
    other_files = [file for file in arrived.tiny.path.rglob("*") if file.is_file() and file != path]
    assert not any(
        secret in file.read_bytes() or secret.hex().encode() in file.read_bytes()
        for file in other_files
    )
    path.write_bytes(b"short")
    with pytest.raises(SetupError, check=has_subject("keys/screening.secret")):
        load_screening_secret(federation)


def test_silo_whose_flagged_submission_was_refused_never_passes_by_trying_again(
    arrived: Arrival, honest: dict[str, Tensor]
) -> None:
    """Each attempt meets other draws, so that enough of them would find one that misses."""
    reasons = send(arrived, make_wild_at(honest, 1.0, 100.0))
    (waiting,) = quarantined_submissions(arrived.tiny.federation, arrived.plan_id)
    record_decision(
        arrived.tiny.federation,
        QuarantineDecision(
            plan_id=arrived.plan_id,
            silo_id=SILO,
            submission_digest=waiting.record.submission_digest,
            verdict="refused",
            reason="looked at it",
            at=now_utc(),
        ),
    )
    assert reasons and arrived.verdict().verdict.kind == "refused"
    again = Arrival(arrived.tiny, arrived.plan_id, arrived.arrive_again(2), arrived.key)
    again.rewrite(lambda document: document.update(sequence=2), version=2)
    assert arrived.tiny.take_in() == []
    (waiting,) = quarantined_submissions(arrived.tiny.federation, arrived.plan_id)
    assert all("was flagged and refused" in reason for reason in waiting.record.reasons), (
        "its expert is honest by now"
    )


def _table() -> dict[str, tuple[int, int]]:
    """Return what the documentation says was tried, and how often it was flagged."""
    # A later table, of honest experts of other kinds, has as many columns with other meanings.
    first_table = DOC.read_text("utf-8").partition("Honest experts of other kinds")[0]
    rows = re.findall(
        r"^\| ([^|]+?) \| (\d+) \| (\d+) \| \d+ \| [^|]*\|$", first_table, re.MULTILINE
    )
    return {what: (int(tried), int(flagged)) for what, tried, flagged in rows}


def test_documented_table_names_every_attack_and_says_the_same_as_these_tests() -> None:
    table = _table()
    assert {*ANSWERS, *OF_A_CLASS} <= set(table)
    assert {what for what in CAUGHT if table[what][0] != table[what][1]} == set()
    assert {what for what in MISSED if table[what][0] == table[what][1]} == set()


@pytest.mark.slow
def test_measured_federation_agrees_with_the_documented_table() -> None:
    """One federation of the measurement: what was always flagged is, what never was is not, honest silos pass."""
    from examples.screening.measure import measure, recipe

    table = _table()
    counts = {what: (tried, flagged) for what, tried, flagged, *_ in measure(recipe(300), 1)}
    assert set(counts) == set(table)
    for what, (tried, flagged) in table.items():
        if flagged in (0, tried):
            assert counts[what][1] == (counts[what][0] if flagged else 0), what
