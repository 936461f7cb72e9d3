"""Loads a plan's public tensors strictly: exactly the names, dtypes and shapes that the plan implies."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ddm.encoders import Encoder, HogEncoder, PcaEncoder, hog_specs, pca_specs
from ddm.encoders.autoencoder import Identity, Latent, open_latent
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.partition.clustering import Clusters, cluster_specs
from ddm.protocol.encoder import HogEncoderSpec, PcaEncoderSpec
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
        num_groups = plan.statistics.counts.num_groups
        cluster_shapes = cluster_specs(plan.clustering.num_fine, plan.encoder.dim)
        clusters = Clusters.from_tensors(
            _load_listed(plan, folder, plan.clustering.path, cluster_shapes)
        )
        clusters.check(plan.clustering.num_coarse, num_groups)

        # Sketches are of what experts see: latents, where the plan has an autoencoder.
        expert_space = plan.data.model_copy(update={"shape": plan.expert_shape})
        sketch_shapes = sketch_specs(expert_space, plan.sketch.rank, num_groups)
        sketch = Sketch.from_tensors(_load_listed(plan, folder, plan.sketch.path, sketch_shapes))
        # The noise of the sketches was computed for this scale; a larger one would break the stated epsilon.
        sketch.check()
        return cls(
            encoder=_load_encoder(plan, folder),
            clusters=clusters,
            sketch=sketch,
            latent=cls.load_latent(plan, folder),
        )

    @staticmethod
    def load_latent(plan: Plan, folder: Path) -> Latent:
        """Open the plan's latent alone; see `ddm.encoders.autoencoder.open_latent`."""
        listed = None
        if isinstance(plan.latent, Autoencoder):
            listed = plan.file(plan.latent.path)
        return open_latent(plan.latent, plan.data.shape, listed, folder)


def _load_listed(
    plan: Plan, folder: Path, path: str, specs: dict[str, TensorSpec]
) -> dict[str, Tensor]:
    """Load a file of the plan, whose size and digest must be those that the plan lists."""
    listed = plan.file(path)
    return load_tensors(folder / path, specs, max_bytes=listed.bytes, digest=listed.digest)


def _load_encoder(plan: Plan, folder: Path) -> Encoder:
    spec = plan.encoder
    if isinstance(spec, PcaEncoderSpec):
        shapes = pca_specs(plan.data, spec.dim)
        return PcaEncoder.from_tensors(_load_listed(plan, folder, spec.path, shapes))
    if isinstance(spec, HogEncoderSpec):
        shapes = hog_specs(spec)
        return HogEncoder.from_tensors(_load_listed(plan, folder, spec.path, shapes), spec)
    # timm takes seconds to import, and most plans do not need it.
    from ddm.encoders.timm import TimmEncoder, timm_specs

    tensors = _load_listed(plan, folder, spec.path, timm_specs(spec))
    return TimmEncoder.from_tensors(tensors, spec, plan.data)
