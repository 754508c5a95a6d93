"""Communication: mesh axes as process groups, and all collectives."""
