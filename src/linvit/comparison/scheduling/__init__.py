"""Who does what, and where: the store of results, the claims on jobs, one scheduler and the places where jobs run."""
