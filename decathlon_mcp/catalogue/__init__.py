"""Which tasks there are: filters, draws, pass rates, requirements."""
