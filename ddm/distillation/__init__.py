"""One dense student of an ensemble: what it is taught, by whom, and how it is kept."""
