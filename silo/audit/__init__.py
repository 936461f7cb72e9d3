"""The leak audit of a site: which units are held out, what is measured before experts leave, and the gate."""
