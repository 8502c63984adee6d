"""Package for code shared by evaluators; empty in this suite."""
