"""The aggregator's side: plan, take in, train the router, publish."""
