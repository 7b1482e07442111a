"""Detection: metrics and drawing."""
