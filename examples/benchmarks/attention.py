"""Attention of one training step in bf16 on a CPU: products written out against torch's fused attention.

Forward and backward passes at the sizes of small transformers, in rounds that alternate; the figures are medians of the
rounds' ratios. Shows up to how many tokens `ddm.models.layers.attend` writes the products out. Writes
build/bench/attention.csv.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.measuring import parse, report, say
from torch import Tensor

# batch, heads, tokens, numbers of a head
SIZES = ((64, 4, 16, 16), (64, 4, 49, 24), (64, 4, 196, 24), (16, 6, 256, 64), (8, 6, 512, 64), (4, 6, 1024, 64))


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own."""
    return F.scaled_dot_product_attention(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products and a softmax."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), -1) @ v


def seconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], size: tuple[int, ...], dtype: torch.dtype) -> float:
    """Processor time of one forward and backward pass."""
    batch, heads, tokens, width = size
    q, k, v = (torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    started = time.process_time()
    torch.autograd.backward(attend(q, k, v).sum())
    return time.process_time() - started


def main() -> None:
    """Command line: --rounds R --quick --json --out FOLDER."""
    args = parse(__doc__, rounds=7)
    torch.set_num_threads(1)
    rows = []
    for size in SIZES[: 2 if args.quick else None]:
        ratios: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
        for _ in range(args.rounds):
            for dtype, found in ratios.items():
                found.append(seconds(fused, size, dtype) / seconds(written_out, size, dtype))
        half, full = (statistics.median(found) for found in ratios.values())
        rows.append((*size, size[2] / size[3], half, full))
        say(f"{size[2]} tokens, {size[3]} numbers a head: {half:.2f} times as fast in bf16, {full:.2f} in fp32")
    report("attention", ("batch", "heads", "tokens", "head", "tokens_per_number", "bf16", "fp32"), rows, args)


if __name__ == "__main__":
    main()
