"""The picture of a hospital's data flow: what stays, what leaves, and through whose hands."""

from tools.pictures.drawing import LEAVING, PERSON, PLAIN, PRIVATE, SIGNED, Box, Drawing


def data_flow_picture() -> str:
    """Draw worker, courier and the folders between them, and below what stays and what leaves."""
    drawing = Drawing(
        840,
        560,
        "Data flow of a hospital: the worker has the images and no network, the courier has the network and no images",
    )
    drawing.area(Box(8, 8, 602, 372), PLAIN, "the hospital")
    drawing.area(Box(658, 8, 174, 372), PLAIN, "the aggregator")
    drawing.line([(634, 20), (634, 372)], PLAIN, dashed=True)
    drawing.text((634, 392), "firewall")

    images = Box(20, 62, 140, 56)
    private_folder = Box(20, 144, 140, 92)
    person = Box(20, 262, 140, 106)
    worker = Box(196, 62, 168, 306)
    outbox = Box(404, 84, 84, 74)
    inbox = Box(404, 272, 84, 74)
    courier = Box(526, 62, 72, 306)
    server = Box(670, 84, 150, 74)
    intake = Box(670, 190, 150, 56)
    plans = Box(670, 272, 150, 74)

    drawing.text((280, 52), "worker's user: no network", bold=True, colour=PRIVATE.stroke)
    drawing.text((500, 52), "courier's user: no images", bold=True, colour=LEAVING.stroke)
    drawing.box(images, PRIVATE, "images", ["and their table"])
    drawing.box(
        private_folder,
        PRIVATE,
        "private/",
        ["signing key, ledger", "of privacy, drafts,", "checkpoints"],
    )
    drawing.box(
        person,
        PERSON,
        "a person",
        ["silo review shows", "all that would", "leave; silo approve", "lets it leave"],
    )
    drawing.box(
        worker,
        PRIVATE,
        "WORKER",
        [
            "",
            "1  verifies the plan",
            "2  obeys policy.toml",
            "3  trains the expert",
            "4  attacks it (audit)",
            "5  draws statistics",
            "with noise (epsilon)",
            "6  writes a draft",
            "7  signs, once it is",
            "approved",
        ],
    )
    drawing.box(outbox, LEAVING, "outbox/", ["signed", "submission"])
    drawing.box(inbox, SIGNED, "inbox/", ["plans,", "receipts"])
    drawing.box(
        courier,
        LEAVING,
        "COURIER",
        ["", "Flower's", "client", "", "calls out;", "no port", "is open"],
    )
    drawing.box(server, PLAIN, "nginx, SuperLink", ["TLS, a key", "for each silo"])
    drawing.box(intake, PLAIN, "intake", ["verifies every byte"])
    drawing.box(plans, SIGNED, "plans, receipts", ["signed; no code,", "no pickle"])

    drawing.arrow([images.right, (worker.x, images.right[1])], PRIVATE)
    drawing.arrow([(worker.x, 190), private_folder.right], PRIVATE)
    drawing.arrow([person.right, (worker.x, person.right[1])], PERSON)
    drawing.arrow([(364, 121), outbox.left], LEAVING)
    drawing.arrow([outbox.right, (526, 121)], LEAVING)
    drawing.arrow([(598, 121), server.left], LEAVING)
    drawing.arrow([server.bottom, intake.top], LEAVING)
    drawing.arrow([intake.bottom, plans.top], SIGNED)
    drawing.arrow([plans.left, (598, 309)], SIGNED)
    drawing.arrow([(526, 309), inbox.right], SIGNED)
    drawing.arrow([inbox.left, (364, 309)], SIGNED)

    drawing.box(
        Box(8, 408, 400, 144),
        PRIVATE,
        "never leaves",
        [
            "images, patients, labels, captions",
            "names of files and folders, tags, paths",
            "error texts and logs",
            "the signing key, the ledger of privacy",
            "checkpoints, reviews and unapproved drafts",
        ],
    )
    drawing.box(
        Box(432, 408, 400, 144),
        LEAVING,
        "leaves, once a person or policy.toml agreed",
        [
            "the expert's weights: they may memorise images,",
            "unless the plan trains privately",
            "statistics with noise, by the plan's epsilon",
            "the exact number of images or patients, the verdict",
            "by enrolling: state and progress, network address;",
            "the card, with the data's size within a factor of two",
        ],
    )
    return drawing.svg()
