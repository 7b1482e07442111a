"""One fair comparison: the grid of runs, the store of their results, where they run, and the report."""
