"""How a plan divides images: clusters of public features, and which experts a silo trains. A part of the plan."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Model, NumImages, RelativePath


class Clustering(Model):
    """Fine k-means of public features, and coarse clusters of the fine centroids, of about equal size if `balanced`."""

    path: RelativePath = "plan/centroids.safetensors"
    num_fine: Annotated[int, Field(gt=0, le=65536)]
    num_coarse: Annotated[int, Field(gt=0, le=4096)]
    balanced: bool = False


class SketchSpec(Model):
    """The public projection through which a router sees an image; statistics use its leading dimensions."""

    path: RelativePath = "plan/sketch.safetensors"
    rank: Annotated[int, Field(gt=0, le=1024)]


class SiloPartition(Model):
    """One expert per silo.

    Attributes:
        min_images: fewest images that an expert is trained on.
    """

    kind: Literal["silo"] = "silo"
    min_images: NumImages


class SiloClusterPartition(Model):
    """One expert per silo and coarse cluster that holds at least `min_images` there, by the noised histogram.

    Attributes:
        min_images: fewest images that an expert is trained on; a cluster with fewer joins the nearest that has enough.
    """

    kind: Literal["silo_cluster"] = "silo_cluster"
    # The noise may name a cluster of which a silo holds few images. To leave that expert out would reveal the true
    # count, so that it is trained on the nearest images as well.
    min_images: NumImages


class RandomPartition(Model):
    """Each silo's images divided at random among `num_parts` experts: the control for the benefit of clustering.

    Attributes:
        min_images: fewest images that an expert is trained on.
        num_parts: experts of each silo.
    """

    kind: Literal["random"] = "random"
    min_images: NumImages
    num_parts: Annotated[int, Field(gt=1, le=64)]


Partition = Annotated[
    SiloPartition | SiloClusterPartition | RandomPartition, Field(discriminator="kind")
]
