"""The aggregator's side: plans, takes in submissions, trains the router, publishes."""
