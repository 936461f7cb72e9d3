"""The researcher's longer commands, one a file; `ddm.cli` registers them."""
