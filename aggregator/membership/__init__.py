"""Which silos belong to a federation: invited, enrolled, withdrawn."""
