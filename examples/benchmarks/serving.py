"""Compares the images a second of `ddm serve` with those of the library called directly, in the same run.

A genuine release of eight untrained experts, which cost what trained ones do. The library draws calls of 64 images, one
after the other. The server runs as a process of its own on loopback; several connections ask at the same time for 1, 16
or 64 images a request, with a seed each, as npz. Rounds alternate between the two, after one round that is not counted;
a figure is the median of the rounds' ratios, and both sides have all threads of the machine, so that it must be idle
otherwise. Writes build/bench/serving.csv.
"""

import http.client
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from open_release import make_release
from support.federation import ARCHITECTURES, TINY
from support.measuring import parse, report, say

from ddm.ensemble import Ensemble
from ddm.loading.ensemble import open_ensemble
from ddm.system.processes import program

BATCH = 64
HOST = "127.0.0.1"
SIZES = (1, 16, BATCH)  # images of a request
PATIENCE_S = 3600


@contextmanager
def running_server(release: Path, root: Path, state: Path) -> Iterator[int]:
    """Run `ddm serve`; yield its port."""
    words = [str(program("ddm")), "serve", str(release), "--root", str(root), "--state", str(state)]
    words += ["--port", "0", "--batch", str(BATCH), "--device", "cpu"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            yield int(line.rpartition(f"{HOST}:")[2].partition("/")[0])
        finally:
            process.terminate()


def ask(port: int, num: int, seed: int, steps: int) -> None:
    """Ask for images, and read all of the answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
    body = json.dumps({"num": num, "seed": seed, "steps": steps, "format": "npz"})
    connection.request("POST", "/sample", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(content.decode())


def served_images_s(port: int, num: int, total: int, steps: int, connections: int) -> float:
    """Return the images a second of the server."""
    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=connections) as pool:
        requests = [pool.submit(ask, port, num, seed, steps) for seed in range(ceil(total / num))]
        for request in requests:
            request.result()
    return total / (time.perf_counter() - started)


def drawn_images_s(ensemble: Ensemble, total: int, steps: int) -> float:
    """Return the images a second of the library."""
    started = time.perf_counter()
    for seed in range(ceil(total / BATCH)):
        ensemble.sample(BATCH, seed=seed, steps=steps, progress=False)
    return total / (time.perf_counter() - started)


def main() -> None:
    """Command line: --rounds N --images N --steps N --connections N --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, rounds=5, images=512, steps=25, connections=BATCH)
    architecture = ARCHITECTURES["64 MiB"]
    images = arguments.images
    steps = arguments.steps
    if arguments.quick:
        architecture = TINY
        images = BATCH
        steps = 2
    work = arguments.work / "serving"
    shutil.rmtree(work, ignore_errors=True)
    release, root = make_release(work, architecture)
    root_path = work / "1.root.json"
    root_path.write_bytes(root)
    ensemble = open_ensemble(release, root=root, state=work / "state")
    rows = []
    with running_server(release, root_path, work / "state") as port:
        for number in range(arguments.rounds + 1):
            for size in SIZES:
                drawn = drawn_images_s(ensemble, images, steps)
                served = served_images_s(port, size, images, steps, arguments.connections)
                say(f"{size} images a request: library {drawn:.1f} images/s, server {served:.1f}")
                if number:
                    rows.append((number, size, round(drawn, 2), round(served, 2), served / drawn))
    shutil.rmtree(work)
    header = ("round", "images_of_request", "library_images_s", "server_images_s", "of_library")
    report("serving", header, rows, arguments)
    for size in SIZES:
        ratio = statistics.median(row[4] for row in rows if row[1] == size)
        say(f"{size} images a request: {ratio:.2f} of the library (median)")


if __name__ == "__main__":
    main()
