"""One DiT, three implementations: ours, diffusers' `DiTTransformer2DModel`, and the reference design on timm's blocks.

Same sizes, same dtype, same threads, class-conditional, in turns, so that a noisy machine slows all of them; the
figures are medians of the rounds' ratios. The bound is the matrix products: the rate of the block's largest product is
measured in the same rounds. Forward is without gradients; a training step is forward, backward and a fused AdamW step.
On a GPU bfloat16, and once more with every model compiled. Writes build/bench/dit.csv.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from support.measuring import parse, report, say
from support.peers import NUM_CLASSES, diffusers_dit, reference_dit
from support.targets import Target, report_targets
from torch import Tensor, nn

from ddm.models import build_expert, num_parameters, training_flops
from ddm.protocol.architecture import ClassCondition, Dit

SIZES = {
    "16M": (Dit(patch=2, hidden=384, depth=6, heads=6), (4, 32, 32), 8),
    "B/2": (Dit(patch=2, hidden=768, depth=12, heads=12), (4, 32, 32), 64),
}
COLUMNS = ("kind", "what", "model", "round", "seconds", "per_s")
CONDITION = ClassCondition(num_classes=NUM_CLASSES)
Batch = tuple[Tensor, Tensor, Tensor]


def models(
    architecture: Dit, shape: tuple[int, int, int], device: str, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """Ours and the peers."""
    networks = {
        "ours": build_expert(architecture, shape, condition=CONDITION),
        "diffusers": diffusers_dit(architecture, shape),
        "timm": reference_dit(architecture, shape),
    }
    return {name: model.to(device, dtype) for name, model in networks.items() if model is not None}


def forward(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """One forward pass."""

    def work() -> None:
        with torch.inference_mode():
            model(*batch)

    return work


def training_step(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """One step of training on made-up targets."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    target = torch.randn_like(batch[0])

    def work() -> None:
        loss = (model(*batch) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return work


def product(batch: int, tokens: int, architecture: Dit, like: Tensor) -> Callable[[], None]:
    """The block's largest matrix product."""
    a = torch.randn(batch * tokens, architecture.hidden).to(like)
    b = torch.randn(architecture.hidden, 4 * architecture.hidden).to(like)

    def work() -> None:
        for _ in range(20):
            a @ b

    return work


def seconds(work: Callable[[], None], repeats: int) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    """Command line: --rounds N --repeats N --quick --json --out FOLDER."""
    arguments = parse(__doc__, rounds=9, repeats=3)
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    architecture, shape, size = SIZES["B/2" if device == "cuda" else "16M"]
    rounds = 2 if arguments.quick else arguments.rounds
    torch.manual_seed(0)
    x = torch.randn(size, *shape, device=device, dtype=dtype)
    batch = (
        x,
        torch.rand(size, device=device).to(dtype),
        torch.arange(size, device=device) % NUM_CLASSES,
    )
    networks = models(architecture, shape, device, dtype)
    for name, model in networks.items():
        say(f"{name}: {num_parameters(model) / 1e6:.2f}M parameters")
    kinds = ("eager", "compiled") if device == "cuda" else ("eager",)
    tokens = (shape[1] // architecture.patch) * (shape[2] // architecture.patch)
    rows = []
    targets = []
    for kind in kinds:
        say(f"{kind}: {rounds} rounds of forward passes and training steps")
        called: dict[str, Any] = {
            n: m if kind == "eager" else torch.compile(m) for n, m in networks.items()
        }
        for what, make in (("forward", forward), ("training step", training_step)):
            works = {name: make(model, batch) for name, model in called.items()}
            # Backward, each product is followed by two of its size.
            operations = training_flops(architecture, shape, size, CONDITION) // (
                3 if what == "forward" else 1
            )
            matmul = product(size, tokens, architecture, x)
            for work in (*works.values(), matmul):
                seconds(work, 2)
            measured = [
                {n: seconds(w, arguments.repeats) for n, w in (*works.items(), ("matmul", matmul))}
                for _ in range(rounds)
            ]
            rate = 20 * 2 * size * tokens * 4 * architecture.hidden**2
            rows += [
                (kind, what, n, number, one[n], size / one[n] if n != "matmul" else rate / one[n])
                for number, one in enumerate(measured)
                for n in one
            ]
            targets += _targets(kind, what, measured, device, operations / rate)
        # Compiling takes minutes on a GPU, so that what is measured is written before.
        report("dit", COLUMNS, rows, arguments)
        report_targets("dit", targets, arguments)


def _targets(
    kind: str, what: str, measured: list[dict[str, float]], device: str, share: float
) -> list[Target]:
    """What is to be reached, from the seconds of each round; `share` is our operations over those of `matmul`."""
    peer = {("cpu", "eager"): 1.05, ("cuda", "eager"): 1.3, ("cuda", "compiled"): 1.0}[device, kind]
    names = [name for name in ("diffusers", "timm") if name in measured[0]]
    peer_targets = [
        Target(f"DiT {what}, {kind}, against {n}", [one[n] / one["ours"] for one in measured], peer)
        for n in names
    ]
    bound = 0.85 if device == "cpu" else 0.5
    rates = [share * one["matmul"] / one["ours"] for one in measured]
    return [*peer_targets, Target(f"DiT {what}, {kind}, share of the matmul rate", rates, bound)]


if __name__ == "__main__":
    main()
