"""What make runs."""
