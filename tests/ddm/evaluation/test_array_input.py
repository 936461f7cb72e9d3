"""Arrays that people hand to the library: each way to hold the same numbers gives the same figures, or is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import ArchipelagoError, DataError, MathError, ShapeError
from ddm.evaluation import Reference, SampleOrigins, evaluate
from ddm.evaluation.intervals import proportion, wilson
from ddm.io.array_input import real_tensor
from tests.support.case import case
from tests.support.errors import has_subject

RNG = np.random.default_rng(0)
SAMPLES = RNG.normal(size=(40, 3))
REFERENCE = RNG.normal(size=(50, 3)) + 0.1


class Frame:
    """A table of another library, which NumPy makes an array of."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


SAME: dict[str, Callable[[np.ndarray], Any]] = {
    "negative strides": lambda array: array[::-1].copy()[::-1],
    "negative strides along a row": lambda array: array[:, ::-1].copy()[:, ::-1],
    "big endian": lambda array: array.astype(">f8"),
    "column order": np.asfortranarray,
    "read only": read_only,
    "a table": Frame,
    "nested lists": lambda array: array.tolist(),
    "a list of rows": list,
    "a list of tensors": lambda array: [torch.from_numpy(row) for row in array.copy()],
    "a tensor with a gradient": lambda array: torch.from_numpy(array.copy()).requires_grad_(True),
    "a transposed tensor": lambda array: torch.from_numpy(array.T.copy()).T,
    "long double": lambda array: array.astype(np.longdouble),
    "a mask that hides nothing": lambda array: np.ma.masked_array(array, mask=False),
}
REFUSED: dict[str, Any] = {
    "complex": SAMPLES + 1j,
    "complex without imaginary parts": SAMPLES.astype(np.complex64),
    "a complex tensor": torch.from_numpy(SAMPLES).to(torch.complex64),
    "a sparse tensor": torch.from_numpy(SAMPLES).to_sparse(),
    "texts": SAMPLES.astype(str),
    "objects": SAMPLES.astype(object),
    "dates": np.zeros((40, 3), "M8[D]"),
    "rows of different lengths": [[1.0, 2.0], [3.0]],
    "a mask": np.ma.masked_array(SAMPLES, mask=SAMPLES > 1),
    "nothing": None,
    "a dictionary": {"images": SAMPLES},
    "a generator": iter(SAMPLES),
    "a text": "samples.npz",
}


def test_same_numbers_give_the_same_figures_however_they_are_held() -> None:
    expected = evaluate(SAMPLES, REFERENCE).to_json()["metrics"]
    for name, held_as in SAME.items():
        with case(name):
            assert evaluate(held_as(SAMPLES), held_as(REFERENCE)).to_json()["metrics"] == expected


def test_whole_numbers_of_every_type_are_taken() -> None:
    whole = RNG.integers(0, 100, (40, 3))
    expected = evaluate(whole.astype(np.float64), REFERENCE).to_json()["metrics"]
    for dtype in ("i1", "u1", ">i2", ">u2", "u2", "i4", ">u4", "u8", "i8"):
        with case(dtype):
            assert evaluate(whole.astype(dtype), REFERENCE).to_json()["metrics"] == expected


def test_numbers_too_large_for_signed_ones_stay_large() -> None:
    assert float(real_tensor(np.array([2**63 + 2**40], np.uint64), "x")[0]) == 2**63 + 2**40


def test_what_holds_no_real_numbers_is_refused_by_the_name_of_its_argument() -> None:
    for name, values in REFUSED.items():
        with (
            case(f"samples: {name}"),
            pytest.raises(DataError, check=has_subject("samples")),
        ):
            evaluate(values, REFERENCE)
        with case(f"reference: {name}"), pytest.raises(DataError, check=has_subject("reference")):
            Reference.of(values)


def test_shapes_that_hold_no_rows_are_refused() -> None:
    for values in (np.float64(3), SAMPLES[:, 0], SAMPLES[:, :0]):
        with case(np.shape(values)), pytest.raises(ShapeError, check=has_subject("samples")):
            evaluate(values, REFERENCE)
    with pytest.raises(MathError, check=has_subject("features")):
        evaluate(SAMPLES[:0], REFERENCE)


def test_silos_and_priors_that_do_not_fit_are_refused() -> None:
    silo_N = np.arange(40) % 2
    for name, (silo, prior, subject) in {
        "a weight of 0 alone": (np.zeros(40), [0], "prior"),
        "weights of 0": (silo_N, [0.0, 0.0], "prior"),
        "a negative weight": (silo_N, [2.0, -1.0], "prior"),
        "NaN": (silo_N, [1.0, np.nan], "prior"),
        "infinity": (silo_N, [1.0, np.inf], "prior"),
        "too few weights": (silo_N, [1.0], "prior"),
        "complex weights": (silo_N, [1.0, 1j], "prior"),
        "weights in a table": (silo_N, [[0.5, 0.5]], "prior"),
        "numbers between silos": (silo_N + 0.5, None, "silo_N"),
        "a negative number": (silo_N - 1, None, "silo_N"),
        "not a number": (np.full(40, np.nan), None, "silo_N"),
        "too few": (silo_N[:-1], None, "silo_N"),
        "names": (["a"] * 40, None, "silo_N"),
    }.items():
        with case(name), pytest.raises(ArchipelagoError) as caught:
            evaluate(SAMPLES, REFERENCE, origins=SampleOrigins(silo, prior=prior))
        assert caught.value.subject == subject, name


def test_silos_and_priors_of_any_byte_order_are_taken() -> None:
    silo_N = np.arange(40) % 2
    origins = SampleOrigins(silo_N[::-1].astype(">i8"), prior=np.array([1, 1], ">f4"))
    evaluation = evaluate(SAMPLES, REFERENCE, origins=origins)
    assert [figures.num for figures in evaluation.per_silo.values()] == [20, 20]
    assert evaluation.share_error is not None
    assert evaluation.share_error.error.value == 0.0


def test_notebook_shows_figures_of_an_evaluation_and_no_tensor() -> None:
    evaluation = evaluate(SAMPLES, REFERENCE)
    assert "kid" in repr(evaluation)
    assert "near copies" in repr(evaluation.copies["pixels"])
    for report in (evaluation, *evaluation.copies.values()):
        assert len(repr(report)) < 250


def test_features_that_are_no_rows_are_refused() -> None:
    def as_arrays(images: torch.Tensor) -> Any:
        return images.numpy().astype(">f4")

    assert evaluate(SAMPLES, REFERENCE, features=as_arrays).metrics["fid"].value >= 0
    for name, features in {
        "one row too few": lambda images: images[1:],
        "volumes": lambda images: images[:, :, None],
        "texts": lambda images: ["a"] * len(images),
        "a name": "encoder",
    }.items():
        with case(name), pytest.raises(ArchipelagoError, check=has_subject("features")):
            evaluate(SAMPLES, REFERENCE, features=features)


def test_ensemble_takes_arrays_where_it_takes_tensors() -> None:
    silos = [lambda x, t: x - 1, lambda x, t: x + 1]
    ensemble = Ensemble(silos, None, np.array([0.7, 0.3], ">f8"), shape=(2,))
    x = RNG.normal(size=(4, 2))
    strange = x.astype(">f8")[::-1]
    once = torch.ones(4)
    assert torch.equal(
        ensemble.posterior(strange, np.ones(4, ">f4")), ensemble.posterior(torch.tensor(x), once)
    )
    drawn = ensemble.sample(steps=2, options=SamplingOptions(noise=strange))
    assert torch.equal(
        drawn.images,
        ensemble.sample(
            steps=2, options=SamplingOptions(noise=torch.from_numpy(x[::-1].copy()))
        ).images,
    )
    assert (
        len(ensemble.sample(2, steps=2, options=SamplingOptions(numbers=np.array([5, 6]))).images)
        == 2
    )
    for name, call in {
        "x_0": lambda: ensemble.sample(options=SamplingOptions(x_0=x + 1j, t_start=0.5)),
        "noise": lambda: ensemble.sample(options=SamplingOptions(noise=x.astype(str))),
        "x": lambda: ensemble.posterior(x + 1j, once),
        "t": lambda: ensemble.velocity(x, ["one"] * 4),
        "images": lambda: ensemble.inpaint(x.astype(object), np.ones((4, 2), bool)),
        "prior": lambda: ensemble.sample(2, prior=np.array(["a", "b"])),
    }.items():
        with case(name), pytest.raises(DataError, check=has_subject(name)):
            call()
    with pytest.raises(ShapeError, check=has_subject("x")):
        ensemble.posterior(x[:, 0], once)


def test_interval_of_a_share_of_all_or_none_ends_exactly_there() -> None:
    for num in range(1, 2000):
        low, high = wilson(num, num)
        assert high == 1.0
        assert 0.0 < low < 1.0
        low, high = wilson(0, num)
        assert low == 0.0
        assert 0.0 < high < 1.0
    assert proportion(torch.ones(7, dtype=torch.bool)).high == 1.0


def test_precision_and_coverage_of_the_reference_itself_end_at_one() -> None:
    metrics = evaluate(REFERENCE, REFERENCE).metrics
    for name in ("precision", "recall", "coverage"):
        assert (metrics[name].value, metrics[name].high) == (1.0, 1.0), name
    assert metrics["density"].low >= 0.0
