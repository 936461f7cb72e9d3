"""Loads a plan's public tensors strictly: exactly the names, dtypes and shapes that the plan implies."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ddm.encoders import Encoder, HogEncoder, PcaEncoder, hog_specs, pca_specs
from ddm.encoders.autoencoder import Identity, Latent, open_latent
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.partition.clustering import Clusters, cluster_specs
from ddm.protocol.encoder import HogEncoder as HogSpec
from ddm.protocol.encoder import PcaEncoder as PcaSpec
from ddm.protocol.latent import Autoencoder
from ddm.protocol.plan import Plan
from ddm.routers.sketch import Sketch, sketch_specs

ENCODER_PATH = "plan/encoder.safetensors"
CENTROIDS_PATH = "plan/centroids.safetensors"
SKETCH_PATH = "plan/sketch.safetensors"


@dataclass(frozen=True)
class PlanFiles:
    """The contents of a plan's files.

    Attributes:
        encoder: public features of an image.
        clusters: fine centroids, their coarse clusters and their groups.
        sketch: the public projection of samples in the experts' space, and its group statistics.
        latent: encodes samples into the experts' space.
    """

    encoder: Encoder
    clusters: Clusters
    sketch: Sketch
    latent: Latent = field(default_factory=Identity)

    @classmethod
    def load(cls, plan: Plan, folder: Path) -> "PlanFiles":
        """Load the files of `plan` from `folder`, which holds `plan/`.

        Raises:
            DigestError: a file differs from the one that the plan lists.
            TensorFileError: a file is not what the plan implies.
            PolicyError: the sketch would not give the privacy that its epsilon states (see `Sketch.check`).
            SetupError: the installed timm does not have the plan's encoder.
        """

        def load(path: str, specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
            listed = plan.file(path)
            return load_tensors(folder / path, specs, max_bytes=listed.bytes, digest=listed.digest)

        dim, num_groups = plan.encoder.dim, plan.statistics.counts.num_groups
        encoder: Encoder
        if isinstance(plan.encoder, PcaSpec):
            encoder = PcaEncoder.from_tensors(load(plan.encoder.path, pca_specs(plan.data, dim)))
        elif isinstance(plan.encoder, HogSpec):
            encoder = HogEncoder.from_tensors(
                load(plan.encoder.path, hog_specs(plan.encoder)), plan.encoder
            )
        else:
            from ddm.encoders.timm import (  # takes seconds, and most plans do not need it
                TimmEncoder,
                timm_specs,
            )

            encoder = TimmEncoder.from_tensors(
                load(plan.encoder.path, timm_specs(plan.encoder)), plan.encoder, plan.data
            )
        cluster_shapes = cluster_specs(plan.clustering.num_fine, dim)
        clusters = Clusters.from_tensors(load(plan.clustering.path, cluster_shapes))
        latent_spec = plan.data.model_copy(update={"shape": plan.expert_shape})
        sketch = Sketch.from_tensors(
            load(plan.sketch.path, sketch_specs(latent_spec, plan.sketch.rank, num_groups))
        )
        sketch.check()
        clusters.check(plan.clustering.num_coarse, num_groups)
        return cls(
            encoder=encoder, clusters=clusters, sketch=sketch, latent=cls.load_latent(plan, folder)
        )

    @staticmethod
    def load_latent(plan: Plan, folder: Path) -> Latent:
        """Open the plan's latent alone; see `ddm.encoders.autoencoder.open_latent`."""
        listed = plan.file(plan.latent.path) if isinstance(plan.latent, Autoencoder) else None
        return open_latent(plan.latent, plan.data.shape, listed, folder)
