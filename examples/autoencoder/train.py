"""Trains the public autoencoder of a plan whose experts work on latents: MONAI's AutoencoderKL, on public images.

    python examples/autoencoder/train.py --data public.npz --out autoencoder.safetensors

`--data` are images, (N, C, H, W) or (N, C, D, H, W), as `ddm.images.array_files.open_arrays` takes them. A tenth is
held out. At the end the program prints the error on it, beside that of the mean image, and the table for `plan.toml`.

The loss is the mean absolute error, 1e-6 of the Kullback-Leibler divergence to a standard normal, and, from half of the
steps on unless the preset is `small`, a tenth of MONAI's patch adversarial loss. A perceptual loss is left out: its
networks would have to be downloaded. An interrupted run continues from its last checkpoint and gives the same result as
an uninterrupted one on the same machine: the randomness of a step depends on seed and step alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.encoders.autoencoder import AutoencoderKl, build_autoencoder
from ddm.images.array_files import open_arrays, read_images
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import AutoencoderSize

PRESETS = {
    "small": AutoencoderSize(
        channels=(32, 64), attention=(False, False), latent_channels=2, num_res_blocks=1
    ),
    "images": AutoencoderSize(
        channels=(128, 256, 512), attention=(False, False, True), latent_channels=4
    ),
    "volumes": AutoencoderSize(
        channels=(32, 64, 128), attention=(False, False, False), latent_channels=4
    ),
}
KL_WEIGHT = 1e-6
ADVERSARIAL_WEIGHT = 0.1
LEARNING_RATE = 1e-3
CRITIC_RATE = 5e-4
HELD_OUT_SHARE = 0.1
MOST_BYTES = 64 * 1024**3


class Run:
    """The state of training, as a checkpoint holds it: the autoencoder and, if the preset has one, its critic."""

    def __init__(
        self, size: AutoencoderSize, shape: tuple[int, ...], *, steps: int, seed: int, critic: bool
    ) -> None:
        self.seed = seed
        self.steps = steps
        self.step = 0
        self.nets = {"autoencoder": build_autoencoder(size, shape, seed=seed)}
        if critic:
            self.nets["critic"] = build_critic(shape, seed)
        rates = {"autoencoder": LEARNING_RATE, "critic": CRITIC_RATE}
        self.optimizers = {
            name: torch.optim.Adam(net.parameters(), rates[name]) for name, net in self.nets.items()
        }
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for net in self.nets.values():
            net.to(device).train()

    def save(self, path: Path) -> None:
        """Write networks, the optimizers' moments and the step."""
        tensors = {"step": torch.tensor([self.step])}
        for name, net in self.nets.items():
            tensors |= {f"{name}.net.{key}": value for key, value in net.state_dict().items()}
            for number, moments in self.optimizers[name].state_dict()["state"].items():
                tensors |= {f"{name}.adam.{number}.{key}": value for key, value in moments.items()}
        save_tensors(path, tensors)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote."""
        tensors = load_tensors(path, None, max_bytes=MOST_BYTES)
        self.step = int(tensors["step"])
        for name, net in self.nets.items():
            net.load_state_dict(below(tensors, f"{name}.net."))
            moments = below(tensors, f"{name}.adam.")
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in moments.items():
                number, _, kind = key.partition(".")
                state.setdefault(int(number), {})[kind] = value
            groups = self.optimizers[name].state_dict()["param_groups"]
            self.optimizers[name].load_state_dict({"state": state, "param_groups": groups})

    def learn(self, images: Tensor, batch: int) -> float:
        """Take one step; return the mean absolute error of its batch."""
        # Two seeds never meet in one step, and what a step draws does not depend on the steps before it.
        torch.manual_seed(self.seed * 2**32 + self.step)
        device = next(self.nets["autoencoder"].parameters()).device
        real_B = images[torch.randint(len(images), (batch,))].to(device)
        fake_B, mean_B, std_B = self.nets["autoencoder"](real_B)
        error = (fake_B - real_B).abs().mean()
        divergence = (
            0.5 * (mean_B.square() + std_B.square() - 2 * std_B.log() - 1).flatten(1).sum(1).mean()
        )
        loss = error + KL_WEIGHT * divergence
        if "critic" in self.nets and 2 * self.step >= self.steps:
            loss = loss + ADVERSARIAL_WEIGHT * self._criticise(real_B, fake_B)
        self._descend("autoencoder", loss)
        self.step += 1
        return float(error.detach())

    def _criticise(self, real_B: Tensor, fake_B: Tensor) -> Tensor:
        """Train the critic to tell images from reconstructions; return the autoencoder's adversarial loss."""
        from monai.losses import PatchAdversarialLoss

        critic = self.nets["critic"]
        adversarial = PatchAdversarialLoss(criterion="least_squares")
        of_real = adversarial(critic(real_B)[-1], target_is_real=True, for_discriminator=True)
        of_fake = adversarial(
            critic(fake_B.detach())[-1], target_is_real=False, for_discriminator=True
        )
        self._descend("critic", (of_real + of_fake) / 2)
        loss: Tensor = adversarial(critic(fake_B)[-1], target_is_real=True, for_discriminator=False)
        return loss

    def _descend(self, name: str, loss: Tensor) -> None:
        self.optimizers[name].zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[name].step()


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def build_critic(shape: tuple[int, ...], seed: int) -> nn.Module:
    """MONAI's patch discriminator, of fewer levels for small pictures."""
    from monai.networks.nets import PatchDiscriminator

    levels = 3 if min(shape[1:]) >= 64 else 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        critic: nn.Module = PatchDiscriminator(
            spatial_dims=len(shape) - 1,
            channels=32,
            in_channels=shape[0],
            out_channels=1,
            num_layers_d=levels,
        )
    return critic


def read_public(path: Path, low: float, high: float) -> Tensor:
    """Read images or volumes of whatever shape the file has."""
    _, row = open_arrays(path).row
    return read_images(path, DataSpec(shape=row if len(row) > 2 else (1, *row), range=(low, high)))


def reconstruction_error(net: nn.Module, size: AutoencoderSize, held_out: Tensor) -> float:
    """Mean absolute error of decoding the latents that experts would see."""
    opened = AutoencoderKl(net, size, tuple(held_out.shape[1:]))
    return float((opened.decode(opened.encode(held_out)) - held_out).abs().mean())


def train(
    images: Tensor, out: Path, preset: str, *, steps: int, batch: int, seed: int, every: int
) -> dict[str, float]:
    """Train, or resume training; write the weights and return the errors on held-out images."""
    size = PRESETS[preset]
    shape = tuple(images.shape[1:])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    num_held_out = max(1, int(HELD_OUT_SHARE * len(images)))
    held_out = images[order[:num_held_out]]
    taught = images[order[num_held_out:]]
    run = Run(size, shape, steps=steps, seed=seed, critic=preset != "small")
    checkpoint = out.with_name(f"{out.stem}.{preset}.{steps}.{batch}.{seed}.checkpoint.safetensors")
    if checkpoint.exists():
        run.load(checkpoint)
        print(f"going on from step {run.step}")
    started = time.monotonic()
    first = run.step
    while run.step < steps:
        error = run.learn(taught, batch)
        if run.step % every == 0 or run.step == steps:
            run.save(checkpoint)
            pace = (time.monotonic() - started) / (run.step - first)
            print(
                f"step {run.step} of {steps}, error {error:.4f}, {pace * (steps - run.step):.0f} s to go",
                flush=True,
            )
    save_tensors(out, run.nets["autoencoder"].state_dict())
    checkpoint.unlink(missing_ok=True)
    return {
        "held out": reconstruction_error(run.nets["autoencoder"], size, held_out),
        "mean image": float((taught.mean(0) - held_out).abs().mean()),
    }


def table(size: AutoencoderSize, out: Path) -> str:
    """Return the table for `plan.toml`."""
    fields = {"kind": "autoencoder_kl", "weights": str(out), **size.model_dump(mode="json")}
    return "\n".join(
        ["[latent]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="npz of public images")
    parser.add_argument("--out", type=Path, required=True, help="FILE.safetensors")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--range", type=float, nargs=2, default=(-1.0, 1.0), metavar=("LOW", "HIGH")
    )
    args = parser.parse_args()
    images = read_public(args.data, *args.range)
    errors = train(
        images,
        args.out,
        args.preset,
        steps=args.steps,
        batch=args.batch,
        seed=args.seed,
        every=args.every,
    )
    width = args.range[1] - args.range[0]
    figures = ", ".join(
        f"{name} {error:.4f} ({error / width:.1%} of the range)" for name, error in errors.items()
    )
    print(
        f"reconstruction, mean absolute error: {figures}\n\n{table(PRESETS[args.preset], args.out)}"
    )


if __name__ == "__main__":
    main()
