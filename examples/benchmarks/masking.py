"""Compares training on a part of the tokens with training on all tokens, to the same held-out loss.

Both train the same expert on crops of scikit-learn's two photographs, and both are measured whole on crops of the right
quarter of each, which neither saw. The masked one takes more steps where it needs them; the figure is the whole one's
time over the masked one's, so images/s at equal loss. Losses do not depend on the machine's load; the seconds of a step
are measured in rounds that alternate. What can be left out depends on the images: of digits of 8 x 8 pixels, each a
token, hardly any can.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from sklearn.datasets import load_sample_images
from support.targets import Target, report_targets
from support.training import train_expert
from torch import Tensor

from ddm.diffusion.path import LinearPath, velocity, x_t
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training

ARCHITECTURE = Dit(patch=4, hidden=96, depth=4, heads=4)
SIDE = 32
SHAPE = (3, SIDE, SIDE)
NUM_IMAGES = 2000
NUM_HELD_OUT = 200
FACTORS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0)
TIMED_STEPS = 10


def crops(num: int, seed: int, *, held_out: bool) -> Tensor:
    """Cut squares out of both photographs in turn, values in [-1, 1], shape (N, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    squares = []
    photos = [
        torch.from_numpy(photo.copy()).permute(2, 0, 1) / 127.5 - 1
        for photo in load_sample_images().images
    ]
    for number in range(num):
        photo = photos[number % len(photos)]
        _, height, width = photo.shape
        border = 3 * width // 4
        low, high = (border, width - SIDE) if held_out else (0, border - SIDE)
        y = int(torch.randint(0, height - SIDE, (1,), generator=generator))
        x = int(torch.randint(low, high, (1,), generator=generator))
        squares.append(photo[:, y : y + SIDE, x : x + SIDE])
    return torch.stack(squares).float()


def recipe(num_steps: int, mask_ratio: float, unmasked_share: float) -> Training:
    return Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.0,
        ema_decay=0.98,
        mask_ratio=mask_ratio,
        unmasked_share=unmasked_share,
    )


def trained(images: Tensor, settings: Training) -> tuple[Mapping[str, Tensor], float]:
    """Return averaged weights and seconds."""
    run, _ = train_expert(ARCHITECTURE, images, settings)
    return run.ema, run.seconds


@torch.no_grad()
def held_out_loss(weights: Mapping[str, Tensor], images: Tensor) -> float:
    """Mean squared error of the velocity, all tokens seen, over times and noise that are the same at every call."""
    expert = build_expert(ARCHITECTURE, SHAPE)
    expert.load_state_dict(dict(weights))
    generator = torch.Generator().manual_seed(0)
    path = LinearPath()
    x_0 = images.repeat(4, 1, 1, 1)
    eps = torch.randn(x_0.shape, generator=generator)
    t_B = (torch.arange(len(x_0)) + 0.5) / len(x_0)
    t_B = t_B[torch.randperm(len(x_0), generator=generator)]
    error = expert(x_t(path, x_0, eps, t_B), t_B) - velocity(path, x_0, eps, t_B)
    return float(error.square().mean())


def seconds_per_step(images: Tensor, mask_ratio: float) -> float:
    started = time.perf_counter()
    settings = recipe(TIMED_STEPS, mask_ratio, unmasked_share=0.0)
    _, seconds = trained(images, settings)
    return min(seconds, time.perf_counter() - started) / TIMED_STEPS


def main() -> None:
    """Command line: --steps N --mask-ratio R --unmasked-share S --rounds N --quick --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mask-ratio", type=float, default=0.5)
    parser.add_argument("--unmasked-share", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 steps, for a quick trial")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = crops(NUM_IMAGES, 0, held_out=False)
    held_out = crops(NUM_HELD_OUT, 1, held_out=True)
    num_steps = 20 if arguments.quick else arguments.steps
    ratio = arguments.mask_ratio
    share = arguments.unmasked_share
    goal = held_out_loss(trained(images, recipe(num_steps, 0.0, share))[0], held_out)
    print(f"whole: {num_steps} steps, held-out loss {goal:.4f}", flush=True)
    for factor in FACTORS:
        masked_steps = round(factor * num_steps)
        loss = held_out_loss(trained(images, recipe(masked_steps, ratio, share))[0], held_out)
        print(f"masked: {masked_steps} steps, held-out loss {loss:.4f}", flush=True)
        if loss <= goal:
            break
    speed = []
    for _ in range(arguments.rounds):
        whole_s = seconds_per_step(images, 0.0)
        masked_s = seconds_per_step(images, ratio)
        speed.append(
            num_steps * whole_s / (masked_steps * ((1 - share) * masked_s + share * whole_s))
        )
        print(f"a step: whole {whole_s * 1e3:.1f} ms, masked {masked_s * 1e3:.1f} ms", flush=True)
    if loss > goal:
        print(f"the masked run did not reach {goal:.4f}; the figure is for its last loss")
    report_targets(
        "masking",
        [Target("masked training, images/s at equal held-out loss", speed, 1.5)],
        arguments,
    )


if __name__ == "__main__":
    main()
