"""From an operator's recipe and public images to a signed plan."""
