"""Draws the toy's two pictures: fields of velocities above their samples, and a small one of samples alone."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor
from world import SHARES, SILOS, ToyWorld

from ddm.ensemble import Ensemble, mix_velocity

SEA = "#0d1b2a"
INK = "#e8eef2"
PALE = "#8fa3b3"
SAND = ("#f2b84b", "#4cc9b0", "#f0718d")  # north, east, west
WIDE = 3.3
HALF_WAY = 0.4
GRID = 41
NUM_SAMPLES = 1500
Velocity = Callable[[Tensor, Tensor], Tensor]


def draw_picture(
    world: ToyWorld,
    ensemble: Ensemble,
    uniform: Callable[[Tensor, Tensor], Tensor],
    errors: Mapping[str, float],
    out: Path,
) -> Path:
    """Draw experts, a wrong combination, the ensemble and the closed form side by side.

    Returns:
        The large picture, ``toy_2d.png``; beside it, ``idea.png`` has the samples alone.
    """

    def expert(k: int) -> Velocity:
        return lambda x, t: ensemble.experts[k](x, t)

    def wrong(x: Tensor, t: Tensor) -> Tensor:
        return mix_velocity(ensemble.experts, x, t, uniform(x, t))

    def exact(x: Tensor, t: Tensor) -> Tensor:
        velocity: Tensor = world.velocity(x.double(), t.double()).float()
        return velocity

    num = len(SILOS)
    figure = Figure(figsize=(3.1 * (num + 3), 6.9), facecolor=SEA)
    axes = figure.subplots(2, num + 3)
    # The samples alone, for a page of 830 pixels: there the text of the large picture is too small to read.
    small_figure = Figure(figsize=(8.3, 1.75), facecolor=SEA)
    small_axes = small_figure.subplots(1, num + 3)
    for k, (silo, share) in enumerate(zip(SILOS, SHARES, strict=True)):
        panel(
            axes[0, k],
            world,
            expert(k),
            f"expert {silo}",
            f"saw its own {share:.0%} of the data alone",
            k,
        )
        prior = [float(j == k) for j in range(num)]
        drawn = ensemble.sample(round(NUM_SAMPLES * share), prior=prior, steps=24)
        scatter(axes[1, k], drawn.images, drawn.expert_N)
        small_panel(small_axes[k], f"expert {silo}", f"{share:.0%} of the data")
        scatter(small_axes[k], drawn.images, drawn.expert_N, size=1)
    columns: tuple[tuple[str, str, Velocity], ...] = (
        ("all, weights 1/K", f"wrong: error {errors['uniform']:.2f}", wrong),
        ("ensemble", f"error {errors['posterior']:.3f}", ensemble.velocity),
        ("closed form", "the truth", exact),
    )
    for column, (title, subtitle, velocity) in enumerate(columns, start=num):
        panel(axes[0, column], world, velocity, title, subtitle)
    blind = Ensemble([wrong], None, [1.0], shape=(2,)).sample(NUM_SAMPLES, steps=24)
    scatter(axes[1, num], blind.images, None)
    drawn = ensemble.sample(NUM_SAMPLES, strategy="full", steps=24)
    scatter(axes[1, num + 1], drawn.images, drawn.expert_N)
    truth = world.draw(NUM_SAMPLES, seed=1)
    scatter(axes[1, num + 2], truth, owners(world, truth))
    small_columns = (
        ("average of all", f"error {errors['uniform']:.2f}: wrong", blind.images, None),
        ("ensemble", f"error {errors['posterior']:.3f}", drawn.images, drawn.expert_N),
        ("all the data", "the truth", truth, owners(world, truth)),
    )
    for column, (title, subtitle, points, silo_N) in enumerate(small_columns, start=num):
        small_panel(small_axes[column], title, subtitle)
        scatter(small_axes[column], points, silo_N, size=1)
    axes[0, 0].set_ylabel(f"velocities at t = {HALF_WAY:g}", color=PALE, fontsize=12, labelpad=8)
    axes[1, 0].set_ylabel("samples, t = 0", color=PALE, fontsize=12, labelpad=8)
    figure.subplots_adjust(left=0.025, right=0.995, top=0.9, bottom=0.01, wspace=0.03, hspace=0.02)
    path = out / "toy_2d.png"
    figure.savefig(path, dpi=110, facecolor=SEA)
    small_figure.subplots_adjust(left=0.005, right=0.995, top=0.79, bottom=0.01, wspace=0.04)
    small_figure.savefig(out / "idea.png", dpi=200, facecolor=SEA)
    return path


def small_panel(axes: Axes, title: str, subtitle: str) -> None:
    """Write the two lines above a panel of the small picture."""
    axes.text(0.5, 1.19, title, color=INK, fontsize=9, ha="center", transform=axes.transAxes)
    axes.text(0.5, 1.05, subtitle, color=PALE, fontsize=7.5, ha="center", transform=axes.transAxes)


def panel(
    axes: Axes,
    world: ToyWorld,
    velocity: Velocity,
    title: str,
    subtitle: str,
    silo: int | None = None,
) -> None:
    """A field of velocities, drawn towards the data, over the density that it is about."""
    side = torch.linspace(-WIDE, WIDE, GRID)
    x_BD = torch.cartesian_prod(side, side)
    with torch.inference_mode():
        u_BD = -velocity(x_BD, torch.full((len(x_BD),), HALF_WAY))
    u, v = (part.view(GRID, GRID).T.numpy() for part in u_BD.unbind(1))
    fine = torch.linspace(-WIDE, WIDE, 161, dtype=torch.float64)
    density = (
        world.density(torch.cartesian_prod(fine, fine), HALF_WAY, silo).view(161, 161).T.numpy()
    )
    colour = SAND[silo] if silo is not None else "#9ab8cc"
    shades = LinearSegmentedColormap.from_list("shades", [SEA, colour])
    axes.imshow(
        density**0.6, origin="lower", extent=(-WIDE, WIDE, -WIDE, WIDE), cmap=shades, alpha=0.75
    )
    speed = np.hypot(u, v)
    # What an expert says where its data never come is no more than a guess: dim.
    near = world.density(x_BD.double(), HALF_WAY, silo).view(GRID, GRID).T.numpy()
    lines = LinearSegmentedColormap.from_list("lines", ["#2b4259", INK])
    width = 0.35 + 1.1 * np.minimum(speed / 4, 1.0)
    shade = (near / near.max()) ** 0.2
    sides = side.numpy()
    axes.streamplot(
        sides, sides, u, v, color=shade, cmap=lines, linewidth=width, density=1.1, arrowsize=0.75
    )
    axes.set_title(f"{title}\n", color=INK, fontsize=15, pad=4)
    axes.text(0.5, 1.03, subtitle, color=PALE, fontsize=10.5, ha="center", transform=axes.transAxes)
    frame(axes)


def scatter(axes: Axes, points_ND: Tensor, silo_N: Tensor | None, size: float = 5) -> None:
    """Samples, coloured by the silo that they come from where one can be named."""
    colours = INK if silo_N is None else [SAND[k] for k in silo_N.tolist()]
    x_N, y_N = points_ND.unbind(1)
    axes.scatter(x_N, y_N, s=size, c=colours, alpha=0.75, linewidths=0)
    frame(axes)


def owners(world: ToyWorld, points_ND: Tensor) -> Tensor:
    """The silo of the most likely component of each point."""
    zero_N = torch.zeros(len(points_ND), dtype=torch.float64)
    most_probable_silo_N: Tensor = world.silo_C[
        world.log_joint(points_ND.double(), zero_N).argmax(1)
    ]
    return most_probable_silo_N


def frame(axes: Axes) -> None:
    """Set the same square limits and background for every panel."""
    axes.set(
        xlim=(-WIDE, WIDE), ylim=(-WIDE, WIDE), xticks=[], yticks=[], facecolor=SEA, aspect="equal"
    )
    for spine in axes.spines.values():
        spine.set_color("#1f3346")
