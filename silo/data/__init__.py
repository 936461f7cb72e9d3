"""A silo's own images, captions and labels in the form that the plan requires."""
