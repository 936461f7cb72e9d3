"""`Clusters.assign` against scikit-learn's `KMeans.predict` on the same features, side by side in one run.

The float32 product of features and centroids is measured in the same rounds, in blocks that stay in the cache and with
nothing else done to the scores. It bounds the speed where the processor has no tiles for bfloat16; with them, assigning
is faster than this product (`ddm.partition.nearest`). Rounds alternate, so that a noisy machine slows all three; the
figures are medians of the rounds' ratios. The features are Gaussian noise, which has no clusters: nothing is easy about
it. A child process each measures by how much a quarter and all of the features raise the peak memory. Writes
build/bench/assignment.csv.
"""

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
from sklearn.cluster import KMeans
from support.measuring import parse, report, say
from support.targets import Target, report_targets
from torch import Tensor

from ddm.partition.clustering import Clusters

BLOCK = 512
# of KMeans.predict's speed: 3 is beyond what float32 products alone allow
WITH_TILES = 3.0
WITHOUT = 1.0


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def product(x_ND: Tensor, c_FD: Tensor) -> None:
    """The scores alone, block by block."""
    for start in range(0, len(x_ND), BLOCK):
        x_ND[start : start + BLOCK] @ c_FD.T


def clusters_of(c_FD: Tensor) -> Clusters:
    """Clusters of one group."""
    index_F = torch.zeros(len(c_FD), dtype=torch.int64)
    return Clusters(c_FD, index_F, index_F)


def k_means_of(c_FD: Tensor) -> KMeans:
    """scikit-learn's model with these very centroids."""
    model = KMeans(len(c_FD), init=c_FD.numpy(), n_init=1, max_iter=1).fit(c_FD.numpy())
    model.cluster_centers_ = c_FD.numpy()
    return model


def raised_mb(num: int, dim: int, centroids: int) -> float:
    """By how much assigning raises the peak memory of this process beyond features and result."""
    features = torch.randn(num, dim)
    clusters = clusters_of(torch.randn(centroids, dim))
    clusters.assign(features[:BLOCK])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clusters.assign(features)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - num * 8 / 2**20


def main() -> None:
    """Command line: --num N --dim D --centroids F --rounds R --quick --json --out FOLDER."""
    args = parse(__doc__, num=1_000_000, dim=384, centroids=1024, rounds=5)
    if args.quick:
        args.num = args.num // 10
        args.rounds = 2
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sizes = [(num, args.dim, args.centroids) for num in (args.num // 4, args.num)]
        quarter_mb, whole_mb = pool.starmap(raised_mb, sizes, chunksize=1)
    torch.manual_seed(0)
    x_ND = torch.randn(args.num, args.dim)
    c_FD = torch.randn(args.centroids, args.dim)
    clusters = clusters_of(c_FD)
    k_means = k_means_of(c_FD)
    same = float(
        (clusters.assign(x_ND[:20_000]).numpy() == k_means.predict(x_ND[:20_000].numpy())).mean()
    )
    flops = 2 * args.num * args.dim * args.centroids
    rows = []
    for index in range(args.rounds):
        ours = seconds(lambda: clusters.assign(x_ND))
        theirs = seconds(lambda: k_means.predict(x_ND.numpy()))
        bound = seconds(lambda: product(x_ND, c_FD))
        rows.append(
            (
                index,
                ours,
                theirs,
                bound,
                theirs / ours,
                bound / ours,
                theirs / bound,
                flops / bound / 1e9,
            )
        )
        say(
            f"round {index}: {theirs / ours:.2f} times KMeans.predict, {bound / ours:.0%} of the product's rate"
        )
    most = statistics.median(row[6] for row in rows)
    print(
        f"{args.num} x {args.dim} to {args.centroids} centroids, {torch.get_num_threads()} threads"
    )
    print(f"the float32 product alone would be {most:.2f} times KMeans.predict's speed")
    print(f"same centroid as KMeans.predict (float32): {same:.4%} of 20,000")
    print(
        f"peak memory raised by {quarter_mb:.1f} MiB for a quarter of the features, {whole_mb:.1f} MiB for all"
    )
    names = (
        "round",
        "assign_s",
        "k_means_s",
        "product_s",
        "speed",
        "share_of_product",
        "most",
        "product_gflops",
    )
    whole = [(*row, quarter_mb, whole_mb, same) for row in rows]
    report("assignment", (*names, "quarter_mb", "whole_mb", "same"), whole, args)
    target = WITH_TILES if torch.cpu.get_capabilities().get("amx_bf16") else WITHOUT
    targets = [
        Target("assignment to centroids, against KMeans.predict", [row[4] for row in rows], target),
        Target("assignment to centroids, share of the matmul rate", [row[5] for row in rows], 0.7),
        Target(
            "assignment memory, all features against a quarter",
            [whole_mb / quarter_mb],
            1.1,
            at_least=False,
        ),
    ]
    report_targets("assignment", targets, args)


if __name__ == "__main__":
    main()
