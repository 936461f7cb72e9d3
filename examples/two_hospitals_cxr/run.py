"""Two hospitals' chest X-rays, from a table of PNG and an npz to a verified release, through the public commands only.

    python examples/two_hospitals_cxr/run.py --hannover FOLDER --pneumonia FILE.npz

README.md says where the images come from, what this shows, and what it does not. Every command that is printed can be
typed by hand.
"""

import argparse
import json
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from shell import Demo, run_demo, timed, write_passphrase  # noqa: E402

DATA = {"hannover": "hannover.csv", "guangzhou": "guangzhou.npz"}
AGAIN = "python examples/two_hospitals_cxr/run.py, as before"


def main() -> int:
    """Command line: --hannover FOLDER --pneumonia NPZ [--out FOLDER] [--recipe FILE] [--num N]."""
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
    parser.add_argument("--num", type=int, default=36, help="samples of each")
    given = parser.parse_args()
    code: int = run_demo(given.out, lambda demo: run(demo, given), AGAIN)
    return code


def run(demo: Demo, given: argparse.Namespace) -> None:
    """The transcript."""
    out = demo.out
    stages: dict[str, float] = {}
    with timed(stages, "lay the data out"):
        sources = ("--hannover", given.hannover, "--pneumonia", given.pneumonia)
        demo.call(sys.executable, HERE / "make_data.py", *sources, "--out", out / "data")
    with timed(stages, "scan"):
        for silo, name in DATA.items():
            demo.call(
                "silo", "scan", "--data", out / "data" / name, "--private", out / f"{silo}-scan"
            )
    with timed(stages, "set up"):
        set_up(demo)
    with timed(stages, "plan"):
        public = out / "data" / "public"
        demo.call(
            "aggregator", "plan", out / "fed", "--recipe", given.recipe, "--public", public, "--yes"
        )
        demo.waive(tuple(DATA), "the images are published already; there is nobody to protect")
    with timed(stages, "train and collect"):
        demo.start("aggregator", "run", out / "fed")
        for silo in DATA:
            demo.start("silo", "run", out / silo)
        demo.wait(*demo.background)
    with timed(stages, "router and release"):
        demo.call("aggregator", "router", out / "fed")
        recipe = tomllib.loads(given.recipe.read_text())
        marks = ["--rehearsal"] if recipe.get("rehearsal") else []
        demo.call("aggregator", "publish", out / "fed", *marks, "--out", out / "release")
    with timed(stages, "verify and sample"):
        trust = ("--root", out / "root.json", "--state", out / "state")
        demo.call("ddm", "verify", out / "release", *trust)
        sample(demo, given.num, *trust)
    (out / "seconds.json").write_text(
        json.dumps({name: round(value, 1) for name, value in stages.items()}) + "\n"
    )
    print(
        f"\nSamples: {out}/hannover.png, guangzhou.png, and both.png, edged in the colour of their silo"
    )
    print("The release's own page: " + str(next((out / "release").rglob("report.html"))))


def set_up(demo: Demo) -> None:
    """Make the federation and both sites, and exchange invitation and cards."""
    out = demo.out
    write_passphrase(out / "fed.pass")
    # fmt: skip
    demo.call(
        "aggregator",
        "init",
        out / "fed",
        "--name",
        "cxr",
        "--licence",
        "CC-BY-4.0",
        "--address",
        f"127.0.0.1:{demo.free_port()}",
        "--passphrase-file",
        out / "fed.pass",
    )
    shutil.copyfile(out / "fed" / "tuf" / "metadata" / "1.root.json", out / "root.json")
    invitation = out / "fed" / "invitation.json"
    fingerprint = json.loads(invitation.read_text())["root_digest"]
    for silo, name in DATA.items():
        write_passphrase(out / f"{silo}.pass")
        # fmt: skip
        demo.call(
            "silo",
            "init",
            out / silo,
            "--id",
            silo,
            "--data",
            out / "data" / name,
            "--invitation",
            invitation,
            "--code",
            fingerprint,
            "--passphrase-file",
            out / f"{silo}.pass",
        )
        shutil.copyfile(HERE / "policy.toml", out / silo / "policy.toml")
        demo.call("silo", "enroll", out / silo, "--out", out / f"{silo}.card.json")
        demo.call("aggregator", "enroll", "--yes", out / "fed", out / f"{silo}.card.json")


def sample(demo: Demo, num: int, *trust: object) -> None:
    """Draw from each hospital's expert alone, and from both equally often."""
    weights = {silo: ",".join(f"{other}={int(other == silo)}" for other in DATA) for silo in DATA}
    for name, prior in {**weights, "both": "equal"}.items():
        # fmt: skip
        demo.call(
            "ddm",
            "sample",
            demo.out / "release",
            *trust,
            "--num",
            num,
            "--prior",
            prior,
            "--steps",
            20,
            "--seed",
            0,
            "--out",
            demo.out / f"{name}.png",
        )


if __name__ == "__main__":
    sys.exit(main())
