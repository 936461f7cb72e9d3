"""The router: trained from what silos sent, compared on public data, reported."""
