"""`make docs`: write every page anew."""

from tools.reference import FOLDER, PAGES

for name, page in PAGES.items():
    (FOLDER / name).write_text(page(), "utf-8")
    print(f"docs/{name}")
