"""The half of a site that has the data: works on one plan at a time, in durable states."""
