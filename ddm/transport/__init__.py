"""What travels between a silo and the aggregator: messages, shards of files, and Flower's records."""
