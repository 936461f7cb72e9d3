"""The researcher's commands, one a file; `ddm.cli.main` registers them."""
