"""The operator's commands, one module each where a command is more than a few lines."""
