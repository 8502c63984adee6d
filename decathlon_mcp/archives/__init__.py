"""Reading, writing and filtering tar archives. The only tar code of the server."""
