"""What the evaluators share."""
