"""The half of a site that has the data: one plan, one state at a time."""
