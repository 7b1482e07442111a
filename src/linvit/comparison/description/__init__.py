"""What is compared: a comparison as it is written, its candidates, and the grid of tasks it expands to."""
