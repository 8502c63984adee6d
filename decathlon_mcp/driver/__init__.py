"""The server's side of the connection to a driver (`decathlon_sandbox`)."""
