"""Three hospitals and an operator on one machine: the whole federation, through the public commands only.

Reads like the transcript in docs/tutorial.md. Every command that is printed can be typed by hand.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from shell import Demo, run_demo, timed, write_passphrase  # noqa: E402
from summary import SILOS, summarise, write_summary  # noqa: E402

PERSON = "north"
MINUTES = 5


def main() -> int:
    """Command line: --out FOLDER [--port N]."""
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
        "--port", type=int, default=0, help="port of the aggregator; a free one when omitted"
    )
    parser.add_argument("--recipe", type=Path, default=HERE / "plan.toml", help="the plan's recipe")
    arguments = parser.parse_args()
    port, recipe = arguments.port, arguments.recipe
    code: int = run_demo(
        arguments.out, lambda demo: run(demo, port or demo.free_port(), recipe), "make demo"
    )
    return code


def run(demo: Demo, port: int, recipe: Path) -> None:
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
            set_up_silo(demo, silo)
    with timed(stages, "plan"):
        public = out / "data" / "public.npz"
        demo.call(
            "aggregator", "plan", out / "fed", "--recipe", recipe, "--public", public, "--yes"
        )
        demo.waive(SILOS, "the digits are public; there is nobody to protect")
    with timed(stages, "train and collect"):
        processes = federate(demo)
    with timed(stages, "router"):
        demo.call("aggregator", "router", out / "fed")
    with timed(stages, "publish"):
        demo.call("aggregator", "publish", out / "fed", "--out", out / "release")
    with timed(stages, "verify and sample"):
        demo.call(
            "ddm", "verify", out / "release", "--root", out / "root.json", "--state", out / "state"
        )
        sample(demo)
    with timed(stages, "summary"):
        summary = summarise(out, SILOS)
    summary |= {
        "seconds": {name: round(value, 1) for name, value in stages.items()},
        "processes": processes,
    }
    write_summary(summary, out)
    print(
        "To compare its routers and strategies with a router that knows no privacy: make demo-compare"
    )


def set_up_aggregator(demo: Demo, port: int) -> None:
    """Make the federation; its root of trust and the key of `model.sig` travel out of band."""
    out = demo.out
    write_passphrase(out / "fed.pass")
    address = f"127.0.0.1:{port}"
    # fmt: skip
    demo.call(
        "aggregator",
        "init",
        out / "fed",
        "--name",
        "digits",
        "--licence",
        "CC-BY-4.0",
        "--address",
        address,
        "--passphrase-file",
        out / "fed.pass",
    )
    shutil.copyfile(out / "fed" / "tuf" / "metadata" / "1.root.json", out / "root.json")
    shutil.copyfile(out / "fed" / "model-signing.pub.pem", out / "model-signing.pub.pem")
    # Small shards, so that even this small expert travels in several; and north, which has 60% of the images, may.
    settings = out / "fed" / "federation.toml"
    written = settings.read_text().replace("shard_bytes = 67108864", "shard_bytes = 524288")
    settings.write_text(written.replace("max_influence = 0.5", "max_influence = 0.7"))


def set_up_silo(demo: Demo, silo: str) -> None:
    """Make a site, write its policy, exchange cards."""
    out = demo.out
    invitation = out / "fed" / "invitation.json"
    fingerprint = json.loads(invitation.read_text())["root_digest"]
    write_passphrase(out / f"{silo}.pass")
    # fmt: skip
    demo.call(
        "silo",
        "init",
        out / silo,
        "--id",
        silo,
        "--data",
        out / "data" / f"{silo}.npz",
        "--invitation",
        invitation,
        "--code",
        fingerprint,
        "--passphrase-file",
        out / f"{silo}.pass",
    )
    policy = "policy_person.toml" if silo == PERSON else "policy_automatic.toml"
    shutil.copyfile(HERE / policy, out / silo / "policy.toml")
    demo.call("silo", "enroll", out / silo, "--out", out / f"{silo}.card.json")
    demo.call("aggregator", "enroll", "--yes", out / "fed", out / f"{silo}.card.json")


def federate(demo: Demo) -> dict[str, object]:
    """Run the aggregator and three silos side by side until every silo has its receipt."""
    out = demo.out
    demo.start("aggregator", "run", out / "fed")
    for silo in SILOS:
        demo.start("silo", "run", out / silo)
    approve(demo)
    demo.wait(*demo.background)
    found: dict[str, object] = demo.flower_processes(SILOS)
    return found


def approve(demo: Demo) -> None:
    """A person at north looks at what would leave, and lets exactly that leave."""
    site = demo.out / PERSON
    while (status := json.loads(demo.ask("silo", "status", site, "--json")))[
        "state"
    ] != "awaiting_approval":
        demo.watch(2.0)
    demo.call("silo", "review", site)
    demo.call("silo", "approve", site, "--digest", status["submission_digest"])


def sample(demo: Demo) -> None:
    """A grid for the eye."""
    out = demo.out
    # fmt: skip
    demo.call(
        "ddm",
        "sample",
        out / "release",
        "--root",
        out / "root.json",
        "--state",
        out / "state",
        "--num",
        "64",
        "--strategy",
        "lock",
        "--tau",
        "1.0",
        "--steps",
        "25",
        "--seed",
        "0",
        "--out",
        out / "samples.png",
    )


if __name__ == "__main__":
    sys.exit(main())
