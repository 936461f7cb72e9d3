"""The picture of keys and signatures: from the root that people compare to the files that a reader opens."""

from tools.pictures.drawing import LEAVING, PERSON, PLAIN, PRIVATE, SIGNED, Box, Drawing


def signatures_picture() -> str:
    """Draw which key vouches for which, what each signs, and who verifies it."""
    drawing = Drawing(
        840,
        574,
        "Keys and signatures: the root names the federation's keys, targets names those of plans, silos and releases",
    )
    root = Box(260, 12, 320, 58)
    targets = Box(260, 116, 320, 58)
    online = Box(20, 116, 180, 58)
    log = Box(645, 116, 180, 58)
    drawing.box(root, PERSON, "root", ["one key, or a threshold of holders, offline"])
    drawing.box(targets, PERSON, "targets", ["the same; enrolls and removes silos"])
    drawing.box(online, PLAIN, "snapshot, timestamp", ["online: what is current"])
    drawing.box(log, PLAIN, "log", ["append-only, witnessed"])
    drawing.arrow([root.bottom, targets.top], PLAIN)
    drawing.arrow([(260, 41), (110, 41), online.top], PLAIN)
    drawing.arrow([(580, 41), (735, 41), log.top], PLAIN)
    drawing.text((430, 98), "names the key of", anchor="start")

    receipts = Box(20, 234, 180, 58)
    plans = Box(225, 234, 180, 58)
    silos = Box(430, 234, 190, 58)
    release = Box(645, 234, 180, 58)
    drawing.box(receipts, SIGNED, "receipts", ["at the aggregator"])
    drawing.box(plans, SIGNED, "plans", ["at the aggregator"])
    drawing.box(silos, PRIVATE, "a key for each silo", ["never leaves its site"])
    drawing.box(release, SIGNED, "release", ["at the aggregator"])
    drawing.line([targets.bottom, (420, 204)], PLAIN)
    for key in (plans, silos, release):
        drawing.arrow([(420, 204), (key.top[0], 204), key.top], PLAIN)
    drawing.arrow([plans.left, receipts.right], PLAIN)

    answers = Box(20, 340, 180, 92)
    plan_files = Box(225, 340, 180, 92)
    silo_files = Box(430, 340, 190, 92)
    release_files = Box(645, 340, 180, 92)
    drawing.box(
        answers,
        SIGNED,
        "receipts",
        ["the aggregator's answer:", "accepted, refused", "or left out"],
    )
    drawing.box(
        plan_files,
        SIGNED,
        "the plan",
        ["what to train and draw,", "epsilon, public parts,", "the receipts key"],
    )
    drawing.box(
        silo_files,
        LEAVING,
        "submission, expert",
        ["republished unchanged:", "the aggregator cannot", "alter them"],
    )
    drawing.box(
        release_files,
        SIGNED,
        "manifest, router",
        ["and the card: what is", "published, and which", "silos take part"],
    )
    signed_by = (
        (receipts, answers),
        (plans, plan_files),
        (silos, silo_files),
        (release, release_files),
    )
    for key, files in signed_by:
        drawing.arrow([key.bottom, files.top], PLAIN)
        drawing.text((key.bottom[0] + 8, 320), "signs", anchor="start")

    silo = Box(20, 478, 385, 88)
    reader = Box(430, 478, 395, 88)
    drawing.box(
        silo,
        PRIVATE,
        "a silo verifies",
        [
            "the root, by its code of six words;",
            "from it plan and receipts;",
            "that the plan names its own key",
        ],
    )
    drawing.box(
        reader,
        PERSON,
        "a researcher verifies (ddm verify)",
        [
            "the root, by the same six words; from it every file,",
            "none missing, none unlisted; that versions, silos'",
            "keys and the log go on from those seen before",
        ],
    )
    for files, verifier in (
        (answers, silo),
        (plan_files, silo),
        (silo_files, reader),
        (release_files, reader),
    ):
        drawing.arrow([files.bottom, (files.bottom[0], verifier.y)], PLAIN)
    return drawing.svg()
