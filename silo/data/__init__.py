"""A silo's own images, as the plan wants to see them."""
