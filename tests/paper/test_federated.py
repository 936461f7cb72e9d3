"""Federated averaging beside the ensemble: rounds, the proximal term, what a target takes; Flower itself is slow."""

from pathlib import Path

import pytest
import torch

from ddm.errors import NumericalError, TransportError
from ddm.io.tensors import load_tensors
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from examples.paper.federated.flattening import flat, named
from examples.paper.federated.running import run
from examples.paper.federated.terms import DONE, FAILED, LOST, ROUND, FederatedTerms
from examples.paper.federated.terms import TERMS as TERMS_FILE
from examples.paper.federated.trainer import learn, pull
from examples.paper.tables.averaging import rounds_in_process
from examples.paper.tables.further import FEDAVG, ONE_SHOT
from examples.paper.tables.results import Cell, Figure
from examples.paper.tables.targets import targets

TERMS = FederatedTerms(
    method="fedprox",
    num_silos=2,
    network=Dit(patch=2, hidden=16, depth=1, heads=2),
    shape=(1, 4, 4),
    rounds=3,
    num_steps=20,
    batch_size=4,
    learning_rate=0.02,
)


def test_rounds_take_all_steps_at_a_falling_rate(tmp_path: Path) -> None:
    assert sum(TERMS.steps_of(number) for number in range(3)) == 20
    rates = [TERMS.rate_of(number) for number in range(3)]
    assert 0 < rates[2] < rates[1] == pytest.approx(0.01) and rates[0] < 0.02
    (tmp_path / ROUND.format(1)).touch()
    (tmp_path / ROUND.format(3)).touch()
    assert TERMS.done(tmp_path) == 1


def test_weights_travel_as_one_vector_and_come_back_under_their_names() -> None:
    state = build_expert(TERMS.network, TERMS.shape, seed=5).state_dict()
    back = named(flat(state), state)
    assert list(back) == list(state) and all(torch.equal(back[name], state[name]) for name in state)
    assert flat(state).shape == (sum(value.numel() for value in state.values()),)


def test_proximal_term_adds_its_own_gradient() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    origin = model.weight.detach().clone()
    pull(model, mu=0.5)
    with torch.no_grad():
        model.weight += 2.0
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, 1.0 + 0.5 * (model.weight.detach() - origin))


def test_round_is_trained_from_the_weights_that_came_and_mu_keeps_it_near_them() -> None:
    images = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    state = build_expert(TERMS.network, TERMS.shape, seed=5).state_dict()
    state = {name: value.detach().clone() for name, value in state.items()}

    def moved(mu: float, number: int = 0, silo: int = 0) -> float:
        weights, trained = learn(TERMS, silo, number, state, images, mu)
        assert trained.steps == TERMS.steps_of(number) and trained.flops > 0
        return sum(float((weights[name] - value).square().sum()) for name, value in state.items())

    assert 0 < moved(1e3) < moved(0.0)
    assert moved(0.0) == moved(0.0) != moved(0.0, silo=1)


@pytest.mark.parametrize(
    ("answered", "lost_after", "said"), [(1, None, "1 silos of 2"), (0, 0, "0 silos of 1")]
)
def test_server_gives_up_a_round_that_a_silo_is_missing_from(
    answered: int,
    lost_after: int | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp.strategy import Result

    from examples.paper.federated import server

    class Strategy:
        def start(self, grid: object, arrays: ArrayRecord, **how: object) -> Result:
            metrics = MetricRecord({"silos": answered, "diverged": 0.0, "flops": 1.0})
            return Result(arrays=arrays, train_metrics_clientapp={1: metrics} if answered else {})

    monkeypatch.setattr(server, "_strategy", lambda terms: Strategy())
    (tmp_path / LOST).touch()
    fault = server._average(None, tmp_path, TERMS.model_copy(update={"lost_after": lost_after}))  # type: ignore[arg-type]
    assert said in fault and "round 1" in fault
    assert TERMS.done(tmp_path) == 0


def test_fault_of_the_server_is_told_to_the_runner(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from examples.paper.federated import server

    class RoutelessGrid:
        def get_node_ids(self) -> list[int]:
            raise OSError("no route")

    (tmp_path / TERMS_FILE).write_text(TERMS.model_dump_json())
    server.main(RoutelessGrid(), SimpleNamespace(run_config={"folder": str(tmp_path)}))
    assert (tmp_path / FAILED).read_text() == "OSError: no route" and not (tmp_path / DONE).exists()


def test_ensemble_is_held_to_its_fid_as_well_as_to_its_bytes() -> None:
    def cell(fid: float, num_bytes: float) -> dict[int, Cell]:
        figures = {"fid": Figure(value=fid), "bytes": Figure(value=num_bytes)}
        terms = {
            "cost": None,
            "router": "",
            "num_samples": 1,
            "sampling_seconds": 1.0,
            "commit": "c",
            "hardware": "h",
            "utc": "0",
        }
        return {seed: Cell(seed=seed, figures=figures, **terms) for seed in range(3)}

    def target(fid: float, num_bytes: float) -> tuple[float, str]:
        rows = targets({8: {ONE_SHOT: cell(fid, num_bytes), FEDAVG: cell(10.0, 1000.0)}})
        target = next(row for row in rows if row.figure.startswith("bytes"))
        return target.value or 0.0, target.met

    assert target(9.0, 9.0)[0] == pytest.approx(0.009) and target(9.0, 9.0)[1] == "yes"
    assert target(11.0, 9.0)[1] == "no" and target(9.0, 11.0)[1] == "no"


@pytest.mark.slow
def test_silo_that_is_killed_half_way_is_done_without_and_a_stopped_run_goes_on(
    tmp_path: Path,
) -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    for silo in range(2):
        images = generator.uniform(-1, 1, (20 + silo, 1, 4, 4)).astype(np.float32)
        np.save(tmp_path / f"silo{silo}.npy", images)
    terms = TERMS.model_copy(update={"method": "fedavg", "lost_after": 2, "num_steps": 6})

    class Stopped(Exception):
        pass

    def stop_after_one() -> None:
        if terms.done(tmp_path):
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path, terms, stop_after_one)
    first = (tmp_path / ROUND.format(1)).read_bytes()
    counted = run(tmp_path, terms, lambda: None)
    assert (tmp_path / ROUND.format(1)).read_bytes() == first and terms.done(tmp_path) == 3
    answered = [
        (tmp_path / f"round-{number:04d}.txt").read_text().split()[1] for number in (1, 2, 3)
    ]
    assert answered == ["2", "2", "1"]
    size = len(first)
    # as many messages as weights that went each way
    assert counted.up > 5 * size and counted.down > 5 * size


@pytest.mark.slow
def test_averaging_in_one_process_gives_the_weights_that_flower_gives(tmp_path: Path) -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    silos = []
    for silo in range(2):
        images = generator.uniform(-1, 1, (20 + 30 * silo, 1, 4, 4)).astype(np.float32)
        np.save(tmp_path / f"silo{silo}.npy", images)
        silos.append(torch.from_numpy(images))
    terms = TERMS.model_copy(update={"method": "fedavg", "rounds": 2, "num_steps": 6})
    run(tmp_path, terms, lambda: None)
    by_flower = load_tensors(tmp_path / ROUND.format(2), None, max_bytes=1 << 20)
    start = build_expert(terms.network, terms.shape, seed=terms.seed).state_dict()
    rounds: list[int] = []
    in_process, flops = rounds_in_process(terms, silos, start, rounds.append)
    assert rounds == [1, 2] and flops > 0
    for name, weight in in_process.items():
        # Flower adds the silos up in the order in which they answer.
        torch.testing.assert_close(weight, by_flower[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(weight, start[name]) for name, weight in in_process.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "silos", "error", "words"),
    [(1e30, 2, NumericalError, "diverged"), (0.5, 1, TransportError, "trainer-1")],
    ids=["diverges", "absent"],
)
def test_run_ends_where_a_silo_diverges_or_does_not_answer(
    value: float, silos: int, error: type[Exception], words: str, tmp_path: Path
) -> None:
    import numpy as np

    for silo in range(silos):
        np.save(tmp_path / f"silo{silo}.npy", np.full((20, 1, 4, 4), value, np.float32))
    with pytest.raises(error, match=words):
        run(tmp_path, TERMS.model_copy(update={"method": "fedavg"}), lambda: None)
