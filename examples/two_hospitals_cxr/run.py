"""Two hospitals' chest X-rays, from a table of PNG and an npz to a verified release, through the public commands only.

    python examples/two_hospitals_cxr/run.py --hannover FOLDER --pneumonia FILE.npz [--base] [--public PATH]

README.md says where the images come from, what this shows, and what it does not. Every command that is printed can be
typed by hand.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

import tomli_w

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from shell import Demo, run_demo, timed  # noqa: E402

DATA = {"hannover": "hannover.csv", "guangzhou": "guangzhou.npz"}
AGAIN = "python examples/two_hospitals_cxr/run.py, as before"
# Of the releases, and of a base of the default public images.
LICENCE = "CC-BY-4.0"
# From a base, of the steps that experts would take from random weights.
SHARE_OF_STEPS = 1 / 8


def main() -> int:
    """Command line: --hannover FOLDER --pneumonia NPZ, and options; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hannover", type=Path, required=True, help="folder with metadata.csv and the pictures"
    )
    parser.add_argument(
        "--pneumonia", type=Path, required=True, help="PneumoniaMNIST, 28 x 28, npz"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/cxr"),
        help="folder to make (an earlier one is replaced)",
    )
    parser.add_argument("--recipe", type=Path, default=HERE / "plan.toml", help="the plan's recipe")
    parser.add_argument(
        "--base",
        action="store_true",
        help="train a base on the public images first, from which both experts start with fewer steps",
    )
    parser.add_argument(
        "--public",
        type=Path,
        metavar="PATH",
        help="public images of another source, folder or file (default: some of both hospitals' images)",
    )
    parser.add_argument(
        "--base-licence",
        metavar="LICENCE",
        help=f"licence of the base, with --public and --base: one that the public images allow (default: {LICENCE})",
    )
    parser.add_argument("--num", type=int, default=36, help="samples of each")
    arguments = parser.parse_args()
    if arguments.base_licence is not None and not arguments.base:
        parser.error("--base-licence is for a base: give --base as well")
    if arguments.public is not None:
        if not arguments.public.exists():
            parser.error(f"--public: there is no {arguments.public}")
        if arguments.base and arguments.base_licence is None:
            parser.error("--public with --base needs --base-licence, such as CC0-1.0")
    code: int = run_demo(arguments.out, lambda demo: run(demo, arguments), AGAIN)
    return code


def run(demo: Demo, given: argparse.Namespace) -> None:
    """The transcript."""
    out = demo.out
    stages: dict[str, float] = {}
    with timed(stages, "lay the data out"):
        sources = ("--hannover", given.hannover, "--pneumonia", given.pneumonia)
        demo.call(sys.executable, HERE / "make_data.py", *sources, "--out", out / "data")
    with timed(stages, "set up"):
        set_up(demo)
    recipe_path = given.recipe
    public = given.public or out / "data" / "public"
    if given.base:
        with timed(stages, "base"):
            recipe_path = write_recipe_with_base(given.recipe, out, given.base_licence or LICENCE)
            demo.call(
                "aggregator", "base", out / "fed", "--recipe", recipe_path, "--public", public
            )
    with timed(stages, "plan"):
        demo.call(
            "aggregator", "plan", out / "fed", "--recipe", recipe_path, "--public", public, "--yes"
        )
    with timed(stages, "train and collect"):
        demo.start("aggregator", "run", out / "fed")
        for silo in DATA:
            demo.start("silo", "run", "--wait", out / silo)
        if given.base:
            demo.accept(tuple(DATA))
        demo.waive(tuple(DATA), "the images are published already; there is nobody to protect")
        demo.wait(*demo.background)
    with timed(stages, "release"):
        recipe = tomllib.loads(given.recipe.read_text())
        marks = ["--rehearsal"] if recipe.get("rehearsal") else []
        demo.call("aggregator", "release", out / "fed", *marks, "--out", out / "release")
    with timed(stages, "verify and sample"):
        trust = ("--root", demo.root, "--state", out / "state")
        demo.call("ddm", "verify", out / "release", *trust)
        sample(demo, given.num, *trust)
    (out / "seconds.json").write_text(
        json.dumps({name: round(value, 1) for name, value in stages.items()}) + "\n"
    )
    print(
        f"\nSamples: {out}/hannover.png, guangzhou.png, and both.png, edged in the colour of their silo"
    )
    print("The release's own page: " + str(next((out / "release").rglob("report.html"))))


def write_recipe_with_base(recipe_path: Path, out: Path, licence: str = LICENCE) -> Path:
    """Write the recipe with a base that takes all its steps, and with experts that take few; return its path."""
    recipe = tomllib.loads(recipe_path.read_text())
    training = recipe["expert"]["training"]
    recipe["base"] = {
        "kind": "trained",
        "folder": str(out / "base"),
        "licence": licence,
        "training": training,
    }
    num_steps = max(round(SHARE_OF_STEPS * training["num_steps"]), 1)
    recipe["expert"]["training"] = training | {"num_steps": num_steps}
    path = out / "plan.toml"
    path.write_text(tomli_w.dumps(recipe))
    return path


def set_up(demo: Demo) -> None:
    """Make the federation and both sites, and exchange invitation and cards."""
    out = demo.out
    demo.call(
        "aggregator", "init", out / "fed", "--name", "cxr", "--licence", LICENCE,
        "--address", f"127.0.0.1:{demo.free_port()}", "--new-passphrase-file", out / "fed.pass",
    )  # fmt: skip
    for silo, name in DATA.items():
        demo.join(silo, out / "data" / name, "--policy", HERE / "policy.toml")
    demo.enroll(tuple(DATA))


def sample(demo: Demo, num: int, *trust: object) -> None:
    """Draw from each hospital's expert alone, and from both equally often."""
    weights = {silo: ",".join(f"{other}={int(other == silo)}" for other in DATA) for silo in DATA}
    for name, prior in {**weights, "both": "equal"}.items():
        demo.call(
            "ddm", "sample", demo.out / "release", *trust, "--num", num, "--prior", prior,
            "--steps", 20, "--seed", 0, "--out", demo.out / f"{name}.png",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
