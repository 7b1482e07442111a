"""Pictures: plots of what was measured."""
