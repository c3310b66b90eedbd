"""What operators deploy."""
