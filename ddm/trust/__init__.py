"""Signatures: keys, the TUF repository, strict verification, signed envelopes."""
