"""Three hospitals and an operator on one machine: the whole federation, through the public commands only.

Reads like the transcript in docs/tutorial.md. Every command that is printed can be typed by hand.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from shell import Demo, run_demo, timed  # noqa: E402
from summary import SILOS, summarise, write_summary  # noqa: E402

PERSON = "north"
MINUTES = 3


def main() -> int:
    """Command line: --out FOLDER [--port N] [--recipe FILE] [--screenshots FOLDER]."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        help="folder to make (an earlier demo is replaced)",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of the aggregator; default: a free one"
    )
    parser.add_argument("--recipe", type=Path, default=HERE / "plan.toml", help="the plan's recipe")
    parser.add_argument(
        "--screenshots",
        type=Path,
        help="folder for screenshots of the live page and of the review page; needs Chromium",
    )
    arguments = parser.parse_args()
    port = arguments.port
    recipe = arguments.recipe
    code: int = run_demo(
        arguments.out,
        lambda demo: run(demo, port or demo.free_port(), recipe, arguments.screenshots),
        "make demo",
    )
    return code


def run(demo: Demo, port: int, recipe: Path, screenshots: Path | None) -> None:
    """The transcript."""
    out = demo.out
    print(
        f"Three silos, an aggregator and a researcher on this machine: about {MINUTES} minutes on two quiet cores."
    )
    stages: dict[str, float] = {}
    with timed(stages, "set up"):
        demo.call(sys.executable, HERE / "make_data.py", "--out", out / "data")
        set_up_aggregator(demo, port)
        for silo in SILOS:
            policy = "policy_person.toml" if silo == PERSON else "policy_automatic.toml"
            demo.join(silo, out / "data" / f"{silo}.npz", "--policy", HERE / policy)
        demo.enroll(SILOS)
    with timed(stages, "plan"):
        public = out / "data" / "public.npz"
        demo.call(
            "aggregator", "plan", out / "fed", "--recipe", recipe, "--public", public, "--yes"
        )
    with timed(stages, "train and collect"):
        processes = federate(demo, screenshots)
    with timed(stages, "release"):
        demo.call("aggregator", "release", out / "fed", "--out", out / "release")
    with timed(stages, "verify and sample"):
        sample(demo)
    with timed(stages, "summary"):
        summary = summarise(out, SILOS)
    summary |= {
        "seconds": {name: round(value, 1) for name, value in stages.items()},
        "processes": processes,
    }
    write_summary(summary, out)
    print("To compare its routers and strategies with a router without privacy: make demo-compare")


def set_up_aggregator(demo: Demo, port: int) -> None:
    """Make the federation."""
    out = demo.out
    demo.call(
        "aggregator", "init", out / "fed", "--name", "digits", "--licence", "CC-BY-4.0",
        "--address", f"127.0.0.1:{port}", "--max-influence", "0.7",
        "--new-passphrase-file", out / "fed.pass",
    )  # fmt: skip
    # Small shards, so that even this small expert travels in several.
    settings = out / "fed" / "federation.toml"
    text = settings.read_text().replace("shard_bytes = 67108864", "shard_bytes = 524288")
    settings.write_text(text)


def federate(demo: Demo, screenshots: Path | None) -> dict[str, object]:
    """Run the aggregator and three silos side by side until every silo has its receipt."""
    out = demo.out
    demo.start("aggregator", "run", out / "fed")
    for silo in SILOS:
        demo.start("silo", "run", "--wait", out / silo)
    demo.waive(SILOS, "the digits are public; there is nobody to protect")
    approve(demo, screenshots)
    demo.wait(*demo.background)
    processes: dict[str, object] = demo.flower_processes(SILOS)
    return processes


def approve(demo: Demo, screenshots: Path | None) -> None:
    """A person at north looks at what would leave, and lets exactly that leave."""
    site = demo.out / PERSON
    while demo.status(PERSON)["state"] != "awaiting_approval":
        demo.watch(2.0)
    if screenshots is not None:
        # Only here, since it needs selenium, which a reader of the tutorial need not have.
        from screenshots import take_screenshots

        take_screenshots(demo, PERSON, screenshots)
    digest = demo.status(PERSON)["submission_digest"]
    demo.call("silo", "review", site, "--text")
    demo.call("silo", "approve", site, "--digest", digest)


def sample(demo: Demo) -> None:
    """A grid for the eye."""
    out = demo.out
    demo.call(
        "ddm", "sample", out / "release", "--root", demo.root, "--state", out / "state",
        "--num", "64", "--strategy", "lock", "--tau", "1.0", "--steps", "25", "--seed", "0",
        "--out", out / "samples.png",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
