"""Times a private step beside a plain one of as many samples: every way to gradients of single units, interleaved.

    python -m examples.benchmarks.private_step [--device cuda] [--repeats 7] [--images train-images.npy]

A way is `plain` (one backward pass, no unit's own gradient), `hooks` (LoRA only: products of what forward and backward
hooks saw, as opacus keeps them), `vmap`, or `loop`. `loop` computes the gradient of each unit alone; experts are
trained this way. The other ways compute several units in one batch, so that a unit's gradient depends on the others by
rounding. Clipping and the grid's rounding are timed with every way but the plain one; the noise by itself, for a number
of weights. Ratios are medians over repeats. Each repeat runs all ways one after another, so that another load of the
machine affects all of them. On a CPU the time is that of one thread's processor.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddm.models import build_expert
from ddm.models.adaptation import LoraLinear, adapt
from ddm.privacy.secret_stream import SecretStream
from ddm.protocol.architecture import Architecture, Dit, Unet
from ddm.protocol.learning import FullAdaptation, LoraAdaptation, Training
from ddm.training.objective import TrainingObjective
from ddm.training.private import clipped, noise_of
from ddm.training.unit_gradients import UnitLoss, UnitSamples, unit_gradient

SHAPE = (1, 28, 28)
ARCHITECTURES: dict[str, Architecture] = {
    "dit": Dit(patch=4, hidden=128, depth=6, heads=4),
    "unet": Unet(
        channels=(32, 64),
        num_res_blocks=1,
        attention=(False, True),
        norm_groups=16,
        head_channels=32,
    ),
}
RECIPE = Training(
    num_steps=1,
    batch_size=1,
    learning_rate=1e-3,
    weight_decay=0.0,
    ema_decay=0.9,
)
Named = dict[str, Tensor]


def by_loop(
    loss: UnitLoss, weights: Mapping[str, Tensor], batch: UnitSamples
) -> tuple[Named, Tensor]:
    """Return each unit's gradient and loss, each computed alone."""
    units = zip(*batch.fields, strict=True)
    gradients, losses = zip(
        *[unit_gradient(loss, weights, UnitSamples(*unit)) for unit in units], strict=True
    )
    return {
        name: torch.stack([gradient[name] for gradient in gradients]) for name in weights
    }, torch.stack(losses)


def by_plain(
    loss: UnitLoss, weights: Mapping[str, Tensor], batch: UnitSamples
) -> tuple[Named, Tensor]:
    """Return the gradient of all units together."""
    loss_B = loss.of_samples(weights, [field.flatten(0, 1) for field in batch.fields])
    gradients = torch.autograd.grad(
        loss_B.view(len(batch), -1).mean(1).sum(), list(weights.values())
    )
    return dict(zip(weights, gradients, strict=True)), loss_B.detach()


def by_hooks(
    loss: UnitLoss, weights: Mapping[str, Tensor], batch: UnitSamples
) -> tuple[Named, Tensor]:
    """Return each unit's gradient of the factors, from inputs that hooks keep and gradients at the layers' outputs.

    The output of each layer gets a tensor of zeros added, whose gradient is the one at the output.
    """
    inputs: Named = {}
    outputs: Named = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            inputs[name] = given[0].detach()
            outputs[name] = torch.zeros_like(out, requires_grad=True)
            return out + outputs[name]

        return hook

    layers = {
        name: module
        for name, module in loss.model.named_modules()
        if isinstance(module, LoraLinear)
    }
    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    frozen = {name: value.detach() for name, value in weights.items()}
    try:
        loss_B = loss.of_samples(frozen, [field.flatten(0, 1) for field in batch.fields])
    finally:
        for handle in handles:
            handle.remove()
    gradients = dict(
        zip(
            outputs,
            torch.autograd.grad(loss_B.view(len(batch), -1).mean(1).sum(), list(outputs.values())),
            strict=True,
        )
    )
    weight_gradients: Named = {}
    for name, layer in layers.items():
        x_UTI = inputs[name].reshape(len(batch), -1, inputs[name].shape[-1])
        g_UTO = layer.scale * gradients[name].reshape(len(batch), -1, gradients[name].shape[-1])
        weight_gradients[f"{name}.down_RI"] = torch.einsum(
            "uto,or,uti->uri", g_UTO, frozen[f"{name}.up_OR"], x_UTI
        )
        h_UTR = x_UTI @ frozen[f"{name}.down_RI"].T
        weight_gradients[f"{name}.up_OR"] = torch.einsum("uto,utr->uor", g_UTO, h_UTR)
    return {name: weight_gradients[name] for name in weights}, loss_B.detach()


def by_vmap(
    loss: UnitLoss, weights: Mapping[str, Tensor], batch: UnitSamples
) -> tuple[Named, Tensor]:
    """Return each unit's gradient and loss: torch maps one unit's gradient over all of them."""
    plain = {name: value.detach() for name, value in weights.items()}

    def of_unit(named: Mapping[str, Tensor], *fields: Tensor) -> Tensor:
        return loss.of_samples(named, fields).mean()

    fields = batch.fields
    mapped = vmap(grad_and_value(of_unit), in_dims=(None, *[0] * len(fields)))
    # the fused kernels have no rule for vmap, which would call them one by one
    with sdpa_kernel(SDPBackend.MATH):
        gradients, loss_U = mapped(plain, *fields)
    return gradients, loss_U


def main() -> None:
    """Time all ways and print a line of JSON for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=Path, help="npy of 28 x 28 images; default: random images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    random = np.random.default_rng(0)
    raw_images = (
        np.load(arguments.images, mmap_mode="r")
        if arguments.images
        else random.standard_normal((512, 28, 28))
    )
    images = torch.from_numpy(np.asarray(raw_images[:512], dtype=np.float32)).reshape(-1, *SHAPE)
    images = images / 127.5 - 1 if arguments.images else images
    for kind, architecture in ARCHITECTURES.items():
        for adaptation in (LoraAdaptation(rank=4, alpha=4.0), FullAdaptation()):
            for num, samples in ((32, 2), (16, 8)):
                model = adapt(build_expert(architecture, SHAPE, seed=0), adaptation, seed=1).to(
                    device
                )
                print(
                    json.dumps(
                        timed(kind, adaptation.kind, model, images, num, samples, arguments.repeats)
                    ),
                    flush=True,
                )
    for num in (10_000, 1_000_000):
        start = time.perf_counter()
        for _ in noise_of(num, 1e7, SecretStream(bytes(32), "noise")):
            pass
        print(json.dumps({"noise of": num, "s": round(time.perf_counter() - start, 4)}), flush=True)


def timed(
    kind: str,
    adaptation: str,
    model: nn.Module,
    images: Tensor,
    num: int,
    samples: int,
    repeats: int,
) -> dict[str, object]:
    """Return the medians of one case: seconds of the plain way, and every other way's ratio to it."""
    device = next(model.parameters()).device
    x_0 = images[torch.randint(len(images), (num, samples))].to(device)
    times = torch.rand(num, samples, device=device)
    batch = UnitSamples(x_0, torch.randn_like(x_0), times)
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = UnitLoss(model, RECIPE, TrainingObjective())
    ways = {"plain": by_plain, "loop": by_loop, "vmap": by_vmap}
    if adaptation == "lora":
        ways["hooks"] = by_hooks
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = clock()
            gradients, _ = way(loss, named, batch)
            if name != "plain":
                for gradient in vmap(lambda unit: clipped(unit, 1.0))(gradients).values():
                    gradient.sum(0, dtype=torch.float64)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first warms up
                seconds[name].append(clock() - start)
    ratios = {
        name: round(
            statistics.median(a / b for a, b in zip(seconds_of_way, seconds["plain"], strict=True)),
            2,
        )
        for name, seconds_of_way in seconds.items()
    }
    weights = sum(value.numel() for value in named.values())
    case = {
        "model": kind,
        "adaptation": adaptation,
        "weights": weights,
        "units": num,
        "samples": samples,
    }
    return case | {"plain_s": round(statistics.median(seconds["plain"]), 4), "ratio": ratios}


if __name__ == "__main__":
    main()
