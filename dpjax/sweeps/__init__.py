"""`sweep` and `rehearse`: a function on a grid of parameters, and simulated releases."""
