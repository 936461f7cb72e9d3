"""From what arrived to what is accepted: verified, plausible, screened, or set aside for a person."""
