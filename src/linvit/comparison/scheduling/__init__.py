"""Who does what, and where: the store of results, the claims on tasks, one scheduler and the places where tasks run."""
