"""What operators do beside the server: tokens, its key, signatures of verdicts, leftovers of dead servers."""
