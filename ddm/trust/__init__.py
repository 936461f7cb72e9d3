"""Who signed what: keys, the TUF repository, strict verification, signed envelopes."""
