"""How fast named devices compute, as their maker publishes it: what times of plans are estimated from.

The rates are peaks of dense matrix products, without sparsity. No program reaches them, so that estimates assume
`UTILISATION` of them, and `MIN_STEP_S` for each step. On an H200, which computes as fast as an H100, an eager step of
DiT-B/2 reached 27% of the published rate, and one of a small DiT took 9.4 ms (docs/results/benchmarks.md). The other
devices were never tried. A training in fp32 does not round its products to TF32 (`ddm.models.arithmetic`), so that TF32
rates, which are several times as high, are not listed.
"""

from dataclasses import dataclass

UTILISATION = 0.3
"""Assumed share of the published rate. Large transformers are reported at 0.3 to 0.5 (Chowdhery et al. 2022, table 3,
PaLM)."""
MIN_STEP_S = 0.01
"""Assumed least duration of a training step on a GPU: launching the kernels of a small expert takes longer than
computing them."""


@dataclass(frozen=True)
class Device:
    """A device that a silo may train on.

    Attributes:
        name: what its maker calls it.
        bf16_flops: operations a second of dense products in bfloat16, summed in float32.
        fp32_flops: operations a second in float32, without tensor cores.
        memory_bytes: its own memory.
        source: where its maker publishes these.
    """

    name: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes: int
    source: str


DEVICES = (
    Device(
        name="NVIDIA H100 SXM",
        bf16_flops=989.4e12,
        fp32_flops=66.9e12,
        memory_bytes=80 * 10**9,
        source="NVIDIA H100 Tensor Core GPU Architecture, white paper, table 2 (2022)",
    ),
    Device(
        name="NVIDIA A100 SXM 80GB",
        bf16_flops=312e12,
        fp32_flops=19.5e12,
        memory_bytes=80 * 10**9,
        source="NVIDIA A100 Tensor Core GPU, data sheet (2021)",
    ),
    Device(
        name="NVIDIA L4",
        bf16_flops=121e12,
        fp32_flops=30.3e12,
        memory_bytes=24 * 10**9,
        source="NVIDIA L4 Tensor Core GPU, data sheet (2023), which states twice the rate, with sparsity",
    ),
    Device(
        name="NVIDIA RTX 4090",
        bf16_flops=165.2e12,
        fp32_flops=82.6e12,
        memory_bytes=24 * 10**9,
        source="NVIDIA Ada GPU Architecture, white paper, appendix A (2022)",
    ),
)
