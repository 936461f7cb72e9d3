"""Takes in submissions: verified, checked for plausibility, screened, then accepted, refused or quarantined."""
