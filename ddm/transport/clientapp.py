"""Flower's program that has one message answered, with a log in which received texts are plain.

python -P -m ddm.transport.clientapp ARGUMENTS-OF-FLWR-CLIENTAPP...
"""

from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

from ddm.transport.flower_log import keep_lines_plain

if __name__ == "__main__":
    keep_lines_plain()
    flwr_clientapp()
