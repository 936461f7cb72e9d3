"""Notebooks as pages of the site: their text and their code, which the repository keeps without outputs."""

import json


def notebook_as_page(text: str) -> str:
    """Return a notebook as Markdown.

    Args:
        text: the notebook, JSON.
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            # Lines such as `!ddm train` are IPython's.
            source = f"```ipython3\n{source}\n```"
        parts.append(source)
    return "\n\n".join(parts) + "\n"
