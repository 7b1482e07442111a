"""What the results say: means and intervals over seeds, and the rows that runs of one candidate make."""
