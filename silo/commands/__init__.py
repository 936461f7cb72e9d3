"""The commands of `silo`, a file for each part of the operator's work; heavy imports wait until one is called."""
