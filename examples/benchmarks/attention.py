"""Attention of one training step in bf16 on a CPU: torch's fused attention against two ways around it.

Forward and backward passes at the sizes of small transformers, in rounds that alternate; the figures are medians of the
rounds' ratios. Shows up to how many tokens `ddm.models.layers.attend` writes the products out, and what it gains by
float32 beyond. Writes build/bench/attention.csv.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.measuring import parse, report, say
from torch import Tensor

# batch, heads, tokens, numbers of a head
SIZES = (
    (64, 4, 16, 16),
    (64, 4, 49, 24),
    (64, 4, 196, 24),
    (16, 6, 256, 64),
    (8, 6, 512, 64),
    (4, 6, 1024, 64),
)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own."""
    return F.scaled_dot_product_attention(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products and a softmax."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), -1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own, after a conversion."""
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)


def seconds(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], size: tuple[int, ...], dtype: torch.dtype
) -> float:
    """Processor time of one forward and backward pass."""
    batch, heads, tokens, width = size
    q, k, v = (
        torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    started = time.process_time()
    torch.autograd.backward(attend(q, k, v).sum())
    return time.process_time() - started


def main() -> None:
    """Command line: --rounds R --quick --json --out FOLDER."""
    args = parse(__doc__, rounds=7)
    torch.set_num_threads(1)
    rows = []
    ways = (
        (written_out, torch.bfloat16),
        (in_float32, torch.bfloat16),
        (written_out, torch.float32),
    )
    for size in SIZES[: 2 if args.quick else None]:
        ratios_of_ways: list[list[float]] = [[] for _ in ways]
        for _ in range(args.rounds):
            for ratios, (way, dtype) in zip(ratios_of_ways, ways, strict=True):
                ratios.append(seconds(fused, size, dtype) / seconds(way, size, dtype))
        out, converted, full = (statistics.median(ratios) for ratios in ratios_of_ways)
        rows.append((*size, size[2] / size[3], out, converted, full))
        of_size = f"{size[2]} tokens, {size[3]} numbers a head: written out"
        say(
            f"{of_size} {out:.2f} times as fast in bf16, in float32 {converted:.2f}; in fp32 written out {full:.2f}"
        )
    head = ("batch", "heads", "tokens", "head", "tokens_per_number", "bf16", "converted", "fp32")
    report("attention", head, rows, args)


if __name__ == "__main__":
    main()
