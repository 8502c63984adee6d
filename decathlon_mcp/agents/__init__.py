"""Agent programs as players: each is started for one episode and gets an address that only plays."""
