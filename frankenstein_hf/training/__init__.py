"""Training programs and what they share."""
