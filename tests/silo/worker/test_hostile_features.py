"""An encoder that came with a plan and amplifies rounding: a unit with fewer images changes no other one's group."""

from pathlib import Path

import torch

from ddm.encoders import PcaEncoder
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.protocol.data import DataSpec
from ddm.routers.sketch import Sketch
from silo.data.cohort import Cohort
from silo.worker.stages import assign_images, read_assignment

SPEC = DataSpec(shape=(1, 6, 11), range=(-1.0, 1.0))
NUM = 200


def hostile_files() -> PlanFiles:
    """The sum of all pixels, a million times: in the images below it is 0, and every digit of it is rounding."""
    basis_RD = torch.full((7, SPEC.dim), 1e6)
    encoder = PcaEncoder(torch.zeros(SPEC.dim), basis_RD)
    centroids_FD = torch.stack([torch.full((7,), -0.1), torch.full((7,), 0.1)])
    cell_F = torch.tensor([0, 1])
    sketch = Sketch.fit(torch.randn(64, *SPEC.shape), torch.zeros(64, dtype=torch.int64), 4, 1)
    return PlanFiles(encoder, Clusters(centroids_FD, cell_F, cell_F), sketch)


def test_removing_an_image_moves_no_other_one_to_another_group(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    half_NB = torch.rand(NUM, SPEC.dim // 2, generator=random)
    order = torch.randperm(SPEC.dim, generator=random)
    images = torch.cat([half_NB, -half_NB], dim=1)[:, order].reshape(NUM, *SPEC.shape)
    files = hostile_files()
    groups = []
    for first in (0, 1, 3):
        folder = tmp_path / str(first)
        folder.mkdir()
        unit_N = torch.arange(NUM - first)
        cohort = Cohort(images[first:], f"from {first}", unit_N, len(unit_N), label_N=None)
        assign_images(cohort, files, folder / "cohort.parquet", lambda num_done, total: None)
        groups.append(read_assignment(cohort, files, folder / "cohort.parquet"))
    assert 0 < int(groups[0].sum()) < NUM, "rounding of both signs, or this test shows nothing"
    assert groups[1].equal(groups[0][1:])
    assert groups[2].equal(groups[0][3:])
