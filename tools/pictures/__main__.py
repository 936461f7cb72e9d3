"""`make docs`: draw every picture again."""

from tools.pictures import FOLDER, PICTURES

for name, picture in PICTURES.items():
    (FOLDER / name).write_text(picture(), "utf-8")
    print(f"docs/pictures/{name}")
