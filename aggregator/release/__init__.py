"""Published versions of the ensemble: made, handed out, withdrawn."""
