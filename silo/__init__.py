"""The silo's side: a worker that has the data and no network, a courier that has the network and no data."""
