"""The courier's side; resolved on the silo's machine, where `silo` is installed."""

import silo.client_app

# A plain assignment: Flower looks for the name in this file's source before a run.
app = silo.client_app.app
