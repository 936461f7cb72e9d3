"""What policy.toml declares of a site's data is held against them, and has one meaning alone."""

from pathlib import Path

import numpy as np
import pytest

from ddm.errors import DataError
from silo.config import DataPolicy, Policy
from silo.data.declared import check_declared
from tests.support.case import case
from tests.support.cohorts import source_at


def test_declared_names_of_which_one_could_mean_two_classes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    kind = {"kind": "arrays", "shape": (4, 4)}
    source = source_at(path, tmp_path / "scans")
    np.savez(path, images=np.zeros((400, 4, 4), np.uint8), labels=[0, 1] * 200)
    check_declared(source, Policy(data=DataPolicy(**kind, classes=("benign", "malignant"))))  # type: ignore[arg-type]
    for names, said in (
        (("1", "0"), "'1' is not 0"),
        (("grade", "Grade"), "differ by more than case"),
    ):
        with case(names=names), pytest.raises(DataError, match=said):
            check_declared(source, Policy(data=DataPolicy(**kind, classes=names)))  # type: ignore[arg-type]
