"""A plan at a silo: received, held against the policy, and given a folder to work in."""
