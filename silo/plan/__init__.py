"""A plan at a silo: received, checked against the policy, and worked on in a folder of its own."""
