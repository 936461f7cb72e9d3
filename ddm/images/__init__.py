"""Images from a path to training samples: find, decode, check, transform, store, and read by rows."""
