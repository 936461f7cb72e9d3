"""One owner's data set in K islands: split, each trained alone, assembled into one signed release."""
