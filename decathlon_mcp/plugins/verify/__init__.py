"""`verify`: checks the signatures of verdicts."""
