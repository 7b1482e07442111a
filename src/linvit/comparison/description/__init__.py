"""What is compared: a comparison as it is written, its candidates, and the grid of jobs it expands to."""
