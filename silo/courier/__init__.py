"""The half of a site that has the network: it fetches plans and delivers what was approved."""
