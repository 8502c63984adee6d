"""Agent programs that play: scripted ones for every change, real ones in a long part."""
